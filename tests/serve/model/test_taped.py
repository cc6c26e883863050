"""Decode steps that are recorded and repeated have the bits of steps that are not, step by step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from quantkit.data import bundled_model
from quantkit_kernels.forward.tape import Refused, record
from quantkit_serve.model import recordings, taped
from quantkit_serve.model.decoder import Decoder
from quantkit_serve.model.runner import ModelRunner
from quantkit_serve.phase import Phase
from tests.serve.model.oracle import runner, step, tokens
from tests.serve.model.tiny import CASES, checkpoint


@pytest.fixture(autouse=True)
def recorded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step of a kind is, so that tests need few; ``test_recordings.py`` has the rule."""
    monkeypatch.setattr(recordings, "FIRST", 2)


def steps_of(found: ModelRunner, batches: list[list[int]], seed: int = 0) -> list[torch.Tensor]:
    """Logits of decode steps; a batch names its sequences, of which sequence s has pages 8 s to 8 s + 7."""
    lengths: dict[int, int] = {}
    results = []
    for number, batch in enumerate(batches):
        runs = []
        for s in batch:
            length = lengths.get(s, 3 * s)
            runs.append((tokens(seed + 100 * number + s, 1), length, range(8 * s, 8 * s + length // 16 + 1)))
            lengths[s] = length + 1
        results.append(found.run(step(Phase.DECODE, runs)))
    return results


def untaped(found: ModelRunner) -> ModelRunner:
    found._taped = None
    return found


def tries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each step that was to be recorded."""
    tried: list[int] = []
    monkeypatch.setattr(taped, "record", lambda *given: (tried.append(1), record(*given))[1])
    return tried


def plays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each step that was repeated from a recording."""
    played: list[int] = []
    tape = taped.Tape
    monkeypatch.setattr(tape, "play", lambda self, play=tape.play: (played.append(1), play(self))[1])
    return played


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("case", ["qwen3_moe", "glm4_moe, groups, no norms", "minimax_m2", "deepseek_v3"])
def test_repeated_steps_have_the_same_bits(
    case: str, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path / "checkpoint", CASES[case])
    batches = [[0, 1, 2], [0, 1, 2], [2, 1], [0], [1, 2, 3], [2, 1, 0], [3, 2], [3], [3, 2], [0], [4, 1, 2]]
    played = plays(monkeypatch)
    settings = {"compute": "bfloat16", "cache": {"kv_dtype": kv_dtype}}
    found = steps_of(runner(path, **settings), batches)
    assert len(played) == 5
    wanted = steps_of(untaped(runner(path, **settings)), batches)
    assert len(played) == 5
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_sparse_steps_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """tiny-glm chooses 64 positions: contexts from below to beyond, and beyond a recording's room of 80 tokens."""
    monkeypatch.setattr(taped, "_SHORTEST", 64)
    played = plays(monkeypatch)
    results = []
    for make in (lambda r: r, untaped):
        found = make(runner(bundled_model("tiny-glm"), compute="bfloat16", cache={"kv_dtype": "fp8"}))
        prompt = tokens(1, 58, 4000)
        found.run(step(Phase.PREFILL, [(prompt, 0, range(4)), (prompt[:20], 0, range(20, 22))]))
        runs = [
            [(tokens(n, 1, 4000), 58 + n, range(12)), (tokens(99 + n, 1, 4000), 20 + n, range(20, 32))]
            for n in range(80)
        ]
        results.append([found.run(step(Phase.DECODE, pair)) for pair in runs])
    assert len(played) == 80 - 2 * 3  # of three kinds the first two steps
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_several_tokens_of_a_sequence_and_other_numbers_of_threads(tmp_path: Path) -> None:
    path, before = checkpoint(tmp_path / "checkpoint", CASES["glm_moe_dsa"]), torch.get_num_threads()
    settings = {"compute": "bfloat16", "cache": {"kv_dtype": "fp8"}}
    batches = [
        step(Phase.DECODE, [(tokens(n, 2), 2 * n, range(3)), (tokens(n + 9, 1), n, range(8, 10))])
        for n in range(4)
    ]
    try:
        found, wanted = runner(path, **settings), untaped(runner(path, **settings))
        for threads, batch in zip((1, 1, 2, 1), batches, strict=True):
            torch.set_num_threads(threads)
            assert torch.equal(found.run(batch), wanted.run(batch))
    finally:
        torch.set_num_threads(before)


def test_logits_are_the_callers_own(tmp_path: Path) -> None:
    found = runner(checkpoint(tmp_path / "checkpoint", CASES["minimax_m2"]), compute="bfloat16")
    results = [found.run(step(Phase.DECODE, [(tokens(n, 1), n, [0])])) for n in range(5)]
    kept = [result.clone() for result in results]
    found.run(step(Phase.DECODE, [(tokens(9, 1), 5, [0])]))
    assert all(torch.equal(a, b) for a, b in zip(results, kept, strict=True))


def test_recordings_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = runner(checkpoint(tmp_path / "checkpoint", CASES["minimax_m2"]), compute="bfloat16")
    assert found._taped is not None
    batches = [list(range(n)) for n in (1, 2, 3, 4, 5) for _ in range(3)]
    steps_of(found, batches)
    assert found._taped.nbytes > 0
    monkeypatch.setattr(recordings, "MOST_BYTES", found._taped.nbytes // 2)
    steps_of(found, [[0, 1, 2, 3, 4, 5]] * 2, seed=5)
    assert 0 < found._taped.nbytes <= recordings.MOST_BYTES
    monkeypatch.setattr(taped, "MOST_BYTES_OF_ONE", 16)
    monkeypatch.setattr(recordings, "MOST_BYTES", 16)
    played = plays(monkeypatch)
    steps_of(found, [[0, 1, 2, 3, 4, 5, 6]] * 4, seed=6)
    assert not played


def test_a_step_that_is_too_large_is_tried_once_and_longer_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path / "checkpoint", CASES["minimax_m2"])
    batches = [[0, 1, 2]] * 3 + [[0, 1, 2, 3]] * 3 + [[0]] * 3
    wanted = steps_of(untaped(runner(path, compute="bfloat16")), batches)
    found = runner(path, compute="bfloat16")
    tried, played, before = tries(monkeypatch), plays(monkeypatch), found._taped
    steps_of(found, [[0]] * 2)
    assert len(tried) == 1 and before is not None
    monkeypatch.setattr(taped, "MOST_BYTES_OF_ONE", before.nbytes + 1)
    results = steps_of(found, batches)
    assert len(tried) == 2 and len(played) == 3  # of three tokens once, of four never
    assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))
    monkeypatch.setattr(taped, "MOST_BYTES_OF_ONE", 100)  # less than a block table
    steps_of(found, [[0, 1]] * 3)
    assert len(tried) == 2


def test_block_tables_count(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoint", CASES["minimax_m2"])
    sizes = []
    for page_size in (16, 1):
        found = runner(path, compute="bfloat16", cache={"page_size": page_size, "kv_dtype": "bf16"})
        for n in range(2):
            found.run(step(Phase.DECODE, [(tokens(n, 1), n, range(2))]))
        assert found._taped is not None
        sizes.append(found._taped.nbytes)
    assert sizes[1] - sizes[0] == 4 * (256 - 16)


def test_an_error_of_the_recording_does_not_end_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(tmp_path / "checkpoint", CASES["minimax_m2"])
    tried: list[int] = []

    def failing(*given: object) -> object:
        tried.append(1)
        record(*given)  # type: ignore[arg-type]
        raise MemoryError("no room for a recording")

    monkeypatch.setattr(taped, "record", failing)
    found, wanted = (
        steps_of(r, [[0, 1]] * 4)
        for r in (runner(path, compute="bfloat16"), untaped(runner(path, compute="bfloat16")))
    )
    assert len(tried) == 1
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_an_error_of_the_step_itself_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = runner(checkpoint(tmp_path / "checkpoint", CASES["minimax_m2"]), compute="bfloat16")
    steps_of(found, [[0]])

    def failing(*given: object) -> object:
        raise ValueError("a wrong expert")

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "forward", failing)
        with pytest.raises(ValueError, match="a wrong expert"):
            steps_of(found, [[0]])
    steps_of(found, [[0]])


def test_a_recording_is_of_its_own_pool(tmp_path: Path) -> None:
    """Another one has other pages: they are written, and the first one's are not."""
    path = checkpoint(tmp_path / "checkpoint", CASES["minimax_m2"])
    found, other = runner(path, compute="bfloat16"), runner(path, compute="bfloat16")
    steps_of(found, [[0]] * 3)
    before = found._memory.clone()  # type: ignore[union-attr]
    found._pools, found._memory, kept = other._pools, other._memory, found._memory
    wanted = steps_of(untaped(runner(path, compute="bfloat16")), [[0]] * 3, seed=9)
    assert all(torch.equal(a, b) for a, b in zip(steps_of(found, [[0]] * 3, seed=9), wanted, strict=True))
    assert torch.equal(kept, before) and found._memory.any()  # type: ignore[arg-type, union-attr]


def test_a_step_that_can_not_be_recorded_runs_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded inputs of FP8 experts go expert by expert, by the numbers of the choice."""
    path = checkpoint(tmp_path / "checkpoint", CASES["minimax_m2"])
    settings = {"compute": "bfloat16", "fp8_activations": "dynamic128"}
    played = plays(monkeypatch)
    found, wanted = (
        steps_of(r, [[0, 1]] * 4) for r in (runner(path, **settings), untaped(runner(path, **settings)))
    )
    assert not played and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_experts_one_by_one_say_so_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``tolist`` reads the ids unseen."""
    reasons = []

    def noted(*given: object) -> object:
        result, tape = record(*given)  # type: ignore[arg-type]
        reasons.append(tape.reason if isinstance(tape, Refused) else None)
        return result, tape

    monkeypatch.setattr(taped, "record", noted)
    path = checkpoint(tmp_path / "checkpoint", CASES["minimax_m2"])
    steps_of(runner(path, compute="bfloat16", fp8_activations="dynamic128"), [[0]] * 3)
    assert reasons == ["experts one by one"]


def test_pages_are_compared_with_the_pool_in_every_step(tmp_path: Path) -> None:
    found = runner(checkpoint(tmp_path / "checkpoint", CASES["minimax_m2"]), pages=8, compute="bfloat16")
    for n in range(4):
        found.run(step(Phase.DECODE, [(tokens(n, 1), n, [0])]))
    batch = step(Phase.DECODE, [(tokens(4, 1), 4, [8])])
    with pytest.raises(ValueError, match="slots must lie in"):
        found.run(batch)
    two = step(Phase.DECODE, [(tokens(4, 1), 16, [np.int32(9), 1])])
    with pytest.raises(ValueError, match="block_table"):
        found.run(two)


def test_the_float32_reference_is_never_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    forward = Decoder.forward
    monkeypatch.setattr(Decoder, "forward", lambda *given: (calls.append(1), forward(*given))[1])
    found = runner(checkpoint(tmp_path / "checkpoint", CASES["minimax_m2"]))
    steps_of(found, [[0]] * 4)
    assert len(calls) == 4
