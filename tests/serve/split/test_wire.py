"""Frames between engine and worker."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

from quantkit_serve.batch import Batch
from quantkit_serve.phase import Phase
from quantkit_serve.split.wire import Channel, Gone, Kind, TooLate, pack_batch, unpack_batch


def batch(rows: int, tokens: int, entries: int, logits: int) -> Batch:
    rng = np.random.default_rng([rows, tokens, entries, logits])
    return Batch(
        Phase.DECODE,
        rng.integers(0, 1 << 40, tokens),
        rng.integers(0, 1 << 40, tokens),
        rng.integers(0, 99, rows + 1).astype(np.int32),
        rng.integers(0, 99, rows).astype(np.int32),
        rng.integers(0, 99, (rows, 2 * entries)).astype(np.int32)[:, ::2],  # not contiguous
        rng.integers(0, 99, logits),
    )


@pytest.mark.parametrize("shape", [(1, 1, 1, 0), (3, 17, 5, 3), (64, 4096, 256, 4096)])
def test_a_batch_crosses_unchanged(shape: tuple[int, int, int, int]) -> None:
    sent = batch(*shape)
    one, other = map(Channel, socket.socketpair())
    thread = threading.Thread(target=lambda: one.send(Kind.RUN, *pack_batch(sent)))
    thread.start()
    kind, payload = other.receive(30)
    thread.join()
    found = unpack_batch(payload)
    assert kind is Kind.RUN and found.phase is sent.phase
    for name in ("token_ids", "positions", "cu_tokens", "lengths", "block_table", "logit_rows"):
        mine, theirs = getattr(found, name), getattr(sent, name)
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape and (mine == theirs).all()
        assert mine.flags.writeable  # or torch complains


def test_a_batch_that_does_not_add_up_is_refused() -> None:
    payload = bytearray(b"".join(pack_batch(batch(2, 3, 4, 1))))
    with pytest.raises(ValueError):
        unpack_batch(payload + b"\0" * 4)
    with pytest.raises(ValueError):
        unpack_batch(payload[:-4])


def test_silence_and_the_end_of_the_other_side() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    with pytest.raises(TooLate):
        channel.receive(0.01)
    with pytest.raises(TooLate):  # nobody reads
        channel.send(Kind.RUN, bytes(1 << 24), limit_s=0.05)
    theirs.send(b"\1")
    theirs.close()
    with pytest.raises(Gone):
        channel.receive(30)
    with pytest.raises(Gone):
        channel.send(Kind.RUN, b"")
