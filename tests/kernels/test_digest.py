"""Our SHA-256 against hashlib's, for every split of the bytes over calls and every pairing of two streams."""

from __future__ import annotations

import hashlib
import random

import pytest

from quantkit_kernels import digest as module
from quantkit_kernels.digest import sha256, update_both

DATA = random.Random(5).randbytes(1 << 16)


@pytest.fixture(params=["native", "hashlib"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "hashlib":
        monkeypatch.setenv("QUANTKIT_KERNELS", "torch")
        assert isinstance(sha256(), type(hashlib.sha256()))
        return
    monkeypatch.delenv("QUANTKIT_KERNELS", raising=False)
    if module._native() is None:
        pytest.skip("this processor or build has no native SHA-256")
    assert not isinstance(sha256(), type(hashlib.sha256()))


def test_every_length() -> None:
    for length in (*range(260), 4095, 4096, 4097, 1 << 16):
        stream = sha256()
        stream.update(DATA[:length])
        assert stream.hexdigest() == hashlib.sha256(DATA[:length]).hexdigest(), length


@pytest.mark.parametrize("seed", range(20))
def test_two_streams_cut_anywhere(seed: int) -> None:
    draw = random.Random(seed)
    ends = [draw.randrange(3000), draw.randrange(3000)]
    first, second, taken = sha256(), sha256(), [0, 0]
    while taken != ends:
        steps = [min(draw.choice((0, 1, 63, 64, 65, 500)), e - t) for e, t in zip(ends, taken, strict=True)]
        a, b = (DATA[t : t + s] for t, s in zip(taken, steps, strict=True))
        update_both(first, memoryview(a), second, bytearray(b))
        taken = [t + s for t, s in zip(taken, steps, strict=True)]
        for stream, upto in zip((first, second), taken, strict=True):  # a digest does not end its stream
            assert stream.hexdigest() == hashlib.sha256(DATA[:upto]).hexdigest()


def test_unaligned_and_read_only_bytes() -> None:
    stream = sha256()
    stream.update(memoryview(DATA)[3:1003])
    assert stream.hexdigest() == hashlib.sha256(DATA[3:1003]).hexdigest()


def test_a_stream_beside_itself_is_refused() -> None:
    stream = sha256()
    with pytest.raises(ValueError, match="two pieces"):
        update_both(stream, b"a", stream, b"b")
