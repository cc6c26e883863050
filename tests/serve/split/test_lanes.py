"""Two lanes over one pool, in one process: what one lane does while the other is in the middle of a step."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quantkit_serve.batch import Batch, StepLost
from quantkit_serve.phase import Phase
from quantkit_serve.request import FinishReason, Output, Request
from quantkit_serve.split.engine import SplitEngine
from tests.serve.engine.fake import WORDS, Answers, FakeRunner, alone, config, held, request
from tests.serve.split.harness import LIMIT_S, split_config


class LocalPair(FakeRunner):
    """As ``Pair``, but both phases are computed here, each when its gate opens."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size=page_size)
        self.runners = {phase: SimpleNamespace(outage=None, num_starts=1) for phase in Phase}
        self.entered = {phase: threading.Event() for phase in Phase}
        self.gates = {phase: threading.Event() for phase in Phase}
        self.lost: set[Phase] = set()
        self.before = self._pass

    @property
    def memory(self) -> NDArray[np.uint8]:
        return self.pages.view(np.uint8)

    def close(self) -> None:
        return None

    def _pass(self, batch: Batch) -> None:
        self.entered[batch.phase].set()
        assert self.gates[batch.phase].wait(LIMIT_S)
        self.gates[batch.phase].clear()
        if batch.phase in self.lost:
            self.lost.remove(batch.phase)
            raise StepLost("lost on purpose")


class Lanes:
    """Each lane's steps are begun and ended apart."""

    def __init__(self, **settings: Any) -> None:
        chosen = config(**settings)
        self.pair = LocalPair(chosen.cache.page_size)
        self.core = SplitEngine(self.pair, chosen, split_config(has_canary=True), WORDS)  # type: ignore[arg-type]
        self.answers = Answers()
        self.threads: dict[Phase, threading.Thread] = {}

    def begin(self, phase: Phase) -> bool:
        """Whether a step is under way now; False if there is nothing to do."""
        if phase in self.threads:
            return True
        self.pair.entered[phase].clear()
        thread = threading.Thread(target=self.core.step, args=(phase, self._deliver))
        thread.start()
        while thread.is_alive() and not self.pair.entered[phase].wait(0.001):
            pass
        if self.pair.entered[phase].is_set():
            self.threads[phase] = thread
        else:
            thread.join()
        return phase in self.threads

    def end(self, phase: Phase) -> None:
        if phase in self.threads:
            self.pair.gates[phase].set()
            self.threads.pop(phase).join(LIMIT_S)

    def step(self, phase: Phase) -> bool:
        found = self.begin(phase)
        self.end(phase)
        return found

    def check(self) -> None:
        with self.core.lock:
            self.core.pool.check_integrity(held(self.core))

    def drain(self) -> None:
        for _ in range(5000):
            if not self.core.has_work:
                break
            for phase in Phase:
                self.step(phase)
                self.check()
        assert not self.core.has_work, "the engine makes no progress"
        for phase in Phase:
            self.end(phase)
        counts = self.core.pool.counts()
        assert counts.used == counts.quarantined == 0
        assert not self.core.scheduler.flying and not self.core.scheduler.transit

    def _deliver(self, outputs: list[Output]) -> None:
        self.answers.add(outputs)


def test_who_is_in_a_prefill_step_makes_room_when_it_has_landed() -> None:
    lanes = Lanes(pages=8, prefix=False)
    old, new = (
        request("old", range(10, 17), 18, ignore_eos=True),
        request("new", range(20, 32), 4, ignore_eos=True),
    )
    lanes.core.add(old)
    lanes.step(Phase.PREFILL)
    lanes.core.add(new)
    assert lanes.begin(Phase.PREFILL)
    steps = 0
    while lanes.step(Phase.DECODE):
        steps += 1
    assert steps == 13  # 20 tokens in 5 pages; the other 3 are being written to
    assert lanes.core.scheduler.num_preemptions == 0
    lanes.check()
    lanes.end(Phase.PREFILL)
    assert lanes.core.scheduler.num_preemptions == 1
    assert lanes.answers.tokens["new"] == alone(new)[:1]  # what it had computed counts
    assert lanes.core.is_due(Phase.DECODE) and lanes.step(Phase.DECODE)
    lanes.drain()
    assert lanes.answers.tokens == {"old": alone(old), "new": alone(new)}


@pytest.mark.parametrize("phase", Phase)
def test_pages_of_one_that_ended_come_back_with_its_step(phase: Phase) -> None:
    """Nothing runs, and the head of the queue doesn't fit: but it will."""
    lanes = Lanes(pages=4, prefix=False)
    first, second = (
        request("a", range(10, 24), 3, ignore_eos=True),
        request("b", range(20, 34), 2, ignore_eos=True),
    )
    lanes.core.add(first)
    if phase is Phase.DECODE:
        lanes.step(Phase.PREFILL)
    assert lanes.begin(phase)
    lanes.core.abort("a")
    lanes.core.add(second)
    assert not any(lanes.step(other) for other in Phase if other is not phase)
    assert lanes.core.figures().num_pages_quarantined == 4
    lanes.end(phase)
    lanes.drain()
    assert lanes.answers.tokens["b"] == alone(second)


def test_a_sequence_decodes_after_its_hand_off_only() -> None:
    lanes = Lanes()
    one = request("a", [4, 5, 6], 4, ignore_eos=True)
    other = request("b", [7, 8], 4, ignore_eos=True)
    lanes.core.add(one)
    lanes.step(Phase.PREFILL)
    lanes.begin(Phase.DECODE)
    lanes.core.add(other)
    lanes.step(Phase.PREFILL)
    assert [s.request_id for s in lanes.core.scheduler.transit] == ["b"]
    lanes.core.abort("b")
    assert not lanes.core.scheduler.transit
    lanes.end(Phase.DECODE)
    lanes.drain()
    assert lanes.answers.tokens["a"] == alone(one)
    assert lanes.core.handoffs.num_checks == 1


def test_cached_pages_are_evicted_while_a_step_is_under_way() -> None:
    """Rows of a block table end with what the row had before: no pages of the step."""
    lanes = Lanes(pages=12, max_num_seqs=3, max_num_batched_tokens=64)

    def prefill(name: str, prompt: range, max_tokens: int) -> Request:
        one = request(name, prompt, max_tokens, ignore_eos=True)
        lanes.core.add(one)
        lanes.step(Phase.PREFILL)
        return one

    prefill("former", range(4, 24), 1)
    requests = [prefill("long", range(30, 39), 2), prefill("other", range(40, 41), 1)]
    requests.append(prefill("short", range(50, 52), 2))
    assert lanes.begin(Phase.DECODE)
    assert lanes.core.pool.counts().cached == 5
    requests.append(prefill("new", range(20, 45), 1))
    lanes.check()
    lanes.drain()
    assert lanes.answers.tokens["new"]
    for one in requests:
        assert lanes.answers.tokens[one.request_id] == alone(one)


def test_what_does_not_fit_at_all_ends_and_the_next_one_runs() -> None:
    lanes = Lanes(pages=4)
    lanes.core.pool.allocate(1, "someone")
    lanes.core.add(request("big", range(10, 25), 2))
    lanes.core.add(request("small", [4, 5], 2, ignore_eos=True))
    assert not lanes.step(Phase.DECODE)
    assert not lanes.answers.last  # decode doesn't judge
    assert not lanes.step(Phase.PREFILL)
    assert lanes.answers.last["big"].finish is FinishReason.ERROR
    assert lanes.core.is_due(Phase.PREFILL) and lanes.step(Phase.PREFILL)


@pytest.mark.parametrize("phase", Phase)
def test_a_lost_step_frees_its_pages(phase: Phase) -> None:
    lanes = Lanes()
    one, other = request("a", [4, 5, 6], 6, ignore_eos=True), request("b", [7, 8], 6, ignore_eos=True)
    lanes.core.add(one)
    lanes.step(Phase.PREFILL)
    lanes.begin(Phase.DECODE)
    lanes.core.add(other)
    lanes.begin(Phase.PREFILL)
    lanes.pair.lost.add(phase)
    lanes.end(phase)
    lanes.check()
    lanes.drain()
    victim, survivor = (other, one) if phase is Phase.PREFILL else (one, other)
    assert lanes.answers.last[victim.request_id].error == "its step was lost: lost on purpose"
    assert lanes.answers.tokens[survivor.request_id] == alone(survivor)


@st.composite
def lives(draw: st.DrawFn) -> tuple[list[Request], list[tuple[str, int]]]:
    requests = []
    for i in range(draw(st.integers(2, 7))):
        shared = draw(st.integers(0, 9))
        rest = draw(st.integers(1, 14))
        prompt = [*range(10, 10 + shared), *((30 + i + 3 * k) % 60 for k in range(rest))]
        requests.append(request(f"r{i}", prompt, draw(st.integers(1, 20)), ignore_eos=True))
    actions = st.sampled_from(["add", "begin", "begin", "begin", "end", "end", "end", "abort", "lose"])
    return requests, draw(st.lists(st.tuples(actions, st.integers(0, 7)), max_size=60))


@settings(max_examples=60, deadline=None)
@given(lives(), st.integers(11, 22), st.booleans())
def test_any_order_of_events_gives_the_same_tokens(
    life: tuple[list[Request], list[tuple[str, int]]], pages: int, deterministic: bool
) -> None:
    requests, actions = life
    lanes = Lanes(pages=pages, deterministic=deterministic)
    waiting = list(requests)
    for action, number in actions:
        phase = tuple(Phase)[number % 2]
        if action == "add" and waiting:
            lanes.core.add(waiting.pop(0))
        elif action == "begin":
            lanes.begin(phase)
        elif action == "end":
            lanes.end(phase)
        elif action == "lose" and phase in lanes.threads:
            lanes.pair.lost.add(phase)
            lanes.end(phase)
        elif action == "abort" and (output := lanes.core.abort(f"r{number}")) is not None:
            lanes.answers.add([output])
        lanes.check()
    for one in waiting:
        lanes.core.add(one)
    for phase in Phase:
        lanes.end(phase)
    lanes.drain()
    for one in requests:
        tokens, last = lanes.answers.tokens.get(one.request_id, []), lanes.answers.last[one.request_id]
        whole = alone(one)
        assert tokens == (whole if last.finish is FinishReason.LENGTH else whole[: len(tokens)])
        assert last.finish is not FinishReason.ERROR or "lost on purpose" in (last.error or "")
    assert lanes.core.figures().kv_tag_mismatches == 0
