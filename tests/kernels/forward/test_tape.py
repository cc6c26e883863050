"""A recorded function repeated on other numbers gives what the function itself gives, or there is no tape."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit_kernels.forward import table as checks
from quantkit_kernels.forward.checked import checked_decode, checked_slots
from quantkit_kernels.forward.checked_table import CheckedTable
from quantkit_kernels.forward.gqa import gqa_decode
from quantkit_kernels.forward.index import index_scores, index_topk
from quantkit_kernels.forward.mla import mla_decode
from quantkit_kernels.forward.pages import GqaLayout, IndexLayout, MlaLayout
from quantkit_kernels.forward.plain import plain_linear
from quantkit_kernels.forward.rows import add, rms_norm, rotate
from quantkit_kernels.forward.tape import Refused, Tape, record

from . import paged
from .made_up import activations

WEIGHT = activations(90, 24, 24)


def taped(function: Callable[[], Tensor]) -> Tape[Tensor]:
    _, tape = record(function)
    assert isinstance(tape, Tape), tape
    return tape


@pytest.mark.parametrize(
    "function",
    [
        lambda x: rms_norm(x, torch.ones(24), 1e-6),
        lambda x: add(plain_linear(x, WEIGHT), x),
        lambda x: rotate(x.view(6, 2, 12), x[:, :3].float().contiguous(), x[:, 3:6].float().contiguous(),
                         is_interleaved=True).view(6, 24),
        lambda x: torch.nn.functional.layer_norm(x.float(), (24,)) + torch.arange(24),
        lambda x: x.t().contiguous().t() * 2,
        lambda x: x.clone().mul_(3).add_(x),
        lambda x: torch.cat([x.topk(3, -1).values, torch.nn.functional.pad(x, (0, 1))], -1),
        lambda x: torch.zeros_like(x).copy_(x),
        lambda x: x.view(2, 3, 24).transpose(0, 1).reshape(6, 24).sigmoid(),
        lambda x: torch.nn.functional.embedding((x[0, :4].float().abs() * 5).long(), WEIGHT),
    ],
)  # fmt: skip
def test_a_tape_has_the_functions_bits(each_implementation: str, function: Callable[[Tensor], Tensor]) -> None:
    x = activations(1, 6, 24)
    tape = taped(lambda: function(x))
    assert torch.equal(tape.result, function(activations(1, 6, 24)))
    for seed in (2, 3, 2):
        other = activations(seed, 6, 24)
        x.copy_(other)
        tape.play()
        assert torch.equal(tape.result, function(other))


def test_numbers_that_are_read_can_not_be_repeated() -> None:
    x = activations(1, 4, 8)
    for function in (
        lambda: x * float(x[0, 0]),
        lambda: x if x.sum() > 0 else -x,
        lambda: torch.from_numpy(checks.values(x.float()) * 2),
        lambda: x[x > 0],
        lambda: x * int(x.float().argmax()),
        lambda: x.flatten()[torch.where(x.flatten() > 0)[0]],
        lambda: x.nonzero(as_tuple=True)[0],
        lambda: torch.repeat_interleave(x, (x[:, 0] > 0).long() + 1, 0),
        lambda: x.narrow(0, (x[0, 0] > 0).long(), 1),
        lambda: torch.tensor_split(x, (x[:2, 0] > 0).long())[0],
        lambda: x + torch.rand(4, 8),
        lambda: torch.nn.functional.dropout(x),
    ):
        result, tape = record(function)
        assert isinstance(tape, Refused) and isinstance(result, Tensor)
    tape = taped(lambda: x * float(torch.zeros(8).sum()))  # a constant is no number of the step
    x.fill_(2)
    tape.play()
    assert (tape.result == 0).all()


def test_a_result_of_another_shape_ends_a_repetition() -> None:
    """Nothing that is known of has one; it would be spread over the recorded result."""
    x = activations(1, 4, 8)
    tape = taped(lambda: torch.roll(x, 1, 0))
    x.resize_(1, 8)
    with pytest.raises(RuntimeError, match=r"roll gives \(1, 8\), recorded \(4, 8\)"):
        tape.play()


def test_results_are_let_go_once_there_can_be_no_tape() -> None:
    """Too large, or what can't be repeated: from there on nothing is kept or noted."""
    x, alive = activations(1, 64, 64), []

    def chain(last: Callable[[Tensor], Tensor] = lambda y: y) -> Tensor:
        y = x
        for _ in range(8):
            y = y * 2  # 8 KiB each
            alive.append(weakref.ref(y.untyped_storage()))
        y = last(y)
        counts.append(sum(one() is not None for one in alive[-8:]))
        return add(y, x)

    counts: list[int] = []
    _, tape = record(chain)
    assert isinstance(tape, Tape) and tape.nbytes == 9 * 8192
    _, tape = record(chain, most_bytes=9 * 8192)
    assert isinstance(tape, Tape)
    result, tape = record(chain, most_bytes=20000)
    assert isinstance(tape, Refused) and tape.is_too_large and "20000 bytes" in tape.reason
    assert torch.equal(result, add(x * 2**8, x))
    _, tape = record(lambda: chain(lambda y: y * float(y[0, 0])))
    assert isinstance(tape, Refused) and not tape.is_too_large
    assert counts == [8, 8, 1, 0]  # the last one is the function's own


def test_recording_imports_no_compiler() -> None:
    """torch would import its own at the first recorded operation: within somebody's decode step."""
    script = """
import sys, torch
from quantkit_kernels.forward.rows import add
from quantkit_kernels.forward.tape import Tape, record
x = torch.ones(4, 8, dtype=torch.bfloat16)
_, tape = record(lambda: add(x * 2, torch.nn.functional.pad(x, (0, 0))))
assert isinstance(tape, Tape)
tape.play()
assert "torch._dynamo" not in sys.modules and "sympy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_what_only_a_native_call_was_given_is_kept(each_level: str) -> None:
    """Tensors that no operation of torch made, which a recorder therefore never saw."""
    x, held = activations(1, 4, 24), []

    def weight() -> Tensor:
        numbers = np.ones(24, np.float32)
        held.append(weakref.ref(numbers))
        return torch.from_numpy(numbers)

    tape = taped(lambda: rms_norm(x, weight(), 1e-6))
    gc.collect()
    assert held[0]() is not None
    del tape
    gc.collect()
    assert held[0]() is None


def test_a_constant_that_is_written_to_is_refused() -> None:
    x = activations(1, 4, 8)
    _, tape = record(lambda: torch.zeros(4, 8).add_(x))
    assert isinstance(tape, Refused)


def test_an_error_ends_the_recording(each_level: str) -> None:
    x = activations(1, 4, 8)
    with pytest.raises(TypeError, match="weight must be float32"):
        record(lambda: rms_norm(x, torch.ones(8).bfloat16(), 1e-6))
    tape = taped(lambda: add(x, x))  # nothing of it is left
    assert torch.equal(tape.result, x + x)


def test_a_table_that_is_filled_again_gives_what_a_new_one_gives(each_level: str) -> None:
    """Attention of a dense, a latent and a sparse kind over steps of a growing batch, each checked for itself."""
    generator = torch.Generator().manual_seed(4)
    gqa, mla, index = GqaLayout(5, 2, 16), MlaLayout(5), IndexLayout(5)
    pools = {layout: paged.fill(layout, 40, generator) for layout in (gqa, mla, index)}
    query = torch.randn(3, 4, 16, generator=generator).bfloat16()
    latent, rope = (torch.randn(3, 2, n, generator=generator).bfloat16() for n in (512, 64))
    keys, weights = torch.randn(3, 2, 128, generator=generator).bfloat16(), torch.rand(3, 2, generator=generator)

    def run(table: CheckedTable) -> Tensor:
        one = gqa_decode(query, pools[gqa], gqa, table, table.lengths, scale=0.2)
        scores = index_scores(keys, weights, pools[index], index, table, table.rows, table.visible)
        chosen = index_topk(scores, table, 7)
        other = mla_decode(
            latent, rope, pools[mla], mla, table, table.lengths, scale=0.05, indices=chosen,
        )  # fmt: skip
        return torch.cat([one.flatten(1), other.flatten(1)], 1)

    def checked(lengths: list[int]) -> CheckedTable:
        return checked_decode(*paged.tables(gqa, lengths, 40, generator), page_size=5, num_pages=40)

    held = checked([9, 1, 20]).hold(8)
    tape = taped(lambda: run(held))
    for lengths in ([9, 1, 20], [10, 2, 21], [38, 40, 0], [3, 3, 3]):
        now = checked(lengths)
        held.refill(now)
        tape.play()
        assert torch.equal(tape.result, run(now))


def test_what_a_held_table_has_no_room_for_is_refused() -> None:
    lengths = torch.tensor([9, 4], dtype=torch.int32)
    block_table = torch.arange(8, dtype=torch.int32).view(2, 4)

    def table(size: int = 5, pages: int = 8, rows: int = 2) -> CheckedTable:
        return checked_decode(block_table[:rows], lengths[:rows], page_size=size, num_pages=pages)

    held = table().hold(2)
    for other in (table(size=4), table(pages=9), table(rows=1)):
        with pytest.raises(ValueError, match="another pool or batch"):
            held.refill(other)
    with pytest.raises(ValueError, match="room for 5"):
        table().hold(1)
    with pytest.raises(ValueError, match="only a held table"):
        table().refill(held)
    slots = checked_slots(torch.tensor([3, 4]), page_size=5, num_pages=8).hold()
    with pytest.raises(ValueError, match="slots of a pool"):
        slots.refill(checked_slots(torch.tensor([3]), page_size=5, num_pages=8))


def test_a_choice_counts_for_its_own_table_only() -> None:
    """With another one its positions are compared like any."""
    generator = torch.Generator().manual_seed(5)
    layout = MlaLayout(5)
    pages = paged.fill(layout, 8, generator)
    numbers = torch.arange(8, dtype=torch.int32).view(1, 8)
    long, short = (
        checked_decode(numbers, torch.tensor([n], dtype=torch.int32), page_size=5, num_pages=8) for n in (40, 4)
    )
    scores = torch.arange(40.0).view(1, 40)
    chosen = index_topk(scores, long, 3)
    assert chosen.positions.tolist() == [[37, 38, 39]]
    query = [torch.randn(1, 2, n, generator=generator).bfloat16() for n in (512, 64)]
    assert mla_decode(*query, pages, layout, long, long.lengths, scale=0.1, indices=chosen).isfinite().all()
    with pytest.raises(ValueError, match="indices must be"):
        mla_decode(*query, pages, layout, short, short.lengths, scale=0.1, indices=chosen)
    with pytest.raises(ValueError, match="scores have 30 columns"):
        index_topk(scores[:, :30], long, 3)
