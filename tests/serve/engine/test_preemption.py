"""Too few pages for everybody: the latest arrivals give way, come back, and lose nothing."""

from __future__ import annotations

import pytest

from quantkit_serve.engine.engine import Engine
from quantkit_serve.phase import Phase
from quantkit_serve.request import FinishReason
from tests.serve.engine.fake import Answers, alone, config, drain, engine, held, request


def crowd(core, count: int = 6, tokens: int = 24):  # type: ignore[no-untyped-def]
    requests = [request(f"r{i}", [5 + i, 6, 7, 8, 9 + i], tokens, ignore_eos=True) for i in range(count)]
    for one in requests:
        core.add(one)
    return requests


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
def test_answers_survive_preemption(deterministic: bool, prefix: bool) -> None:
    core, runner = engine(config(pages=14, prefix=prefix, deterministic=deterministic))
    requests = crowd(core)
    answers = drain(core)
    assert core.figures().preemptions > 0
    for one in requests:
        assert answers.tokens[one.request_id] == alone(one)
    runs = [n for b in runner.batches if b.phase is Phase.DECODE for n in (b.cu_tokens[1:] - b.cu_tokens[:-1])]
    assert max(runs) == 1 if deterministic else max(runs) > 1  # what was generated is replayed


@pytest.mark.parametrize(("pages", "tokens"), [(8, 23), (9, 23), (11, 23), (14, 23), (20, 23), (24, 60), (40, 60)])
@pytest.mark.parametrize("chunk", [2, 16])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_admission_makes_progress(pages: int, tokens: int, chunk: int, deterministic: bool) -> None:
    """No ping-pong: who comes back generates a page's worth of tokens before it has to give way again."""
    page_size = 4
    settings = config(pages=pages, page_size=page_size, deterministic=deterministic, max_num_batched_tokens=chunk)
    core, _ = engine(settings)
    requests = crowd(core, 7, tokens)
    answers = drain_with_progress(core)
    assert core.figures().preemptions <= len(requests) * (tokens // page_size)
    for one in requests:
        assert answers.tokens[one.request_id] == alone(one)


def test_room_is_left_for_the_time_that_a_replay_takes() -> None:
    """Pages come free right after the latest one was preempted; the earlier one needs them while that replays."""
    core, _ = engine(config(pages=45, page_size=4, deterministic=True, prefix=False))
    requests = [
        request(name, [5, 6, 7, i], tokens, ignore_eos=True)
        for i, (name, tokens) in enumerate([("short", 58), ("long", 170), ("latest", 100)])
    ]
    for one in requests:
        core.add(one)
    answers = drain_with_progress(core)
    assert core.figures().preemptions == 1
    for one in requests:
        assert answers.tokens[one.request_id] == alone(one)


def drain_with_progress(core: Engine) -> Answers:
    """Between two preemptions everybody generates a page's worth of tokens, and nobody is overtaken."""
    since: dict[str, int] = {}
    answers = Answers()
    while core.has_work:
        before = {s.request_id: s for s in core.scheduler.running}
        answers.add(core.step())
        running = {s.request_id: s for s in core.scheduler.running}
        for name in running.keys() - before.keys():
            since[name] = running[name].num_generated
        for sequence in core.scheduler.waiting:
            if sequence.request_id in before:  # preempted in this step
                assert sequence.num_generated - since[sequence.request_id] >= core.config.cache.page_size
        arrivals = [s.arrival for s in core.scheduler.running] + [s.arrival for s in core.scheduler.waiting]
        assert arrivals == sorted(arrivals), "somebody was overtaken"
        core.pool.check_integrity(held(core))
    return answers


def test_a_preempted_request_can_be_aborted() -> None:
    core, _ = engine(config(pages=14))
    requests = crowd(core)
    answers = Answers()
    while not core.figures().preemptions:
        answers.add(core.step())
    (gone,) = [s for s in core.scheduler.waiting if s.num_preemptions][:1]
    output = core.abort(gone.request_id)
    assert output is not None
    answers.add([output])
    drain(core, answers)
    for one in requests:
        whole = alone(one)
        assert answers.tokens[one.request_id] == (
            whole[: gone.num_generated] if one.request_id == gone.request_id else whole
        )


def test_prompt_logprobs_come_once_and_survive_preemption() -> None:
    alone_core, _ = engine()
    one = request("r", range(1, 12), 20, ignore_eos=True, prompt_logprobs=2, logprobs=1)
    alone_core.add(one)
    reference = drain(alone_core).all["r"]
    core, _ = engine(config(pages=9, max_num_batched_tokens=3))
    core.add(request("first", range(20, 30), 20, ignore_eos=True))
    core.add(one)
    answers = drain(core)
    assert core.figures().preemptions
    for outputs in (reference, answers.all["r"]):
        assert [o.prompt_logprobs is not None for o in outputs] == [True] + [False] * 19
    assert answers.all["r"][0].prompt_logprobs == reference[0].prompt_logprobs
    assert [o.logprobs for o in answers.all["r"]] == [o.logprobs for o in reference]


def test_prompt_logprobs_survive_a_preemption_between_chunks() -> None:
    """Admission sees to it that this is rare; pages lost to a fault can still cause it."""
    one = request("r", range(1, 12), 3, ignore_eos=True, prompt_logprobs=2)
    found = []
    for is_preempted in (False, True):
        core, _ = engine(config(max_num_batched_tokens=4))
        core.add(one)
        answers = Answers()
        answers.add(core.step())
        answers.add(core.step())
        if is_preempted:
            core.scheduler._preempt(core.scheduler.running[-1])
        found.append(drain(core, answers).all["r"])
    assert len(found[0][0].prompt_logprobs or ()) == 11
    assert found[0] == found[1]


def test_a_request_that_stops_fitting_ends_with_an_error() -> None:
    """Pages can be lost to a fault; whoever can never be admitted is told, and nobody waits for ever."""
    core, _ = engine(config(pages=8))
    core.pool.allocate(4, "lost")
    core.add(request("big", range(1, 21), 4))
    core.add(request("small", [5], 4))
    answers = Answers()
    while core.has_work:
        answers.add(core.step())
    assert answers.last["big"].finish is FinishReason.ERROR and "4 pages left" in (answers.last["big"].error or "")
    assert answers.tokens["small"] == alone(request("small", [5], 4))


def test_a_request_that_outgrows_what_is_left_ends_with_an_error() -> None:
    core, _ = engine(config(pages=8))
    core.pool.allocate(5, "lost")
    core.add(request("r", range(1, 9), 20, ignore_eos=True))
    answers = Answers()
    while core.has_work:
        answers.add(core.step())
    assert answers.last["r"].finish is FinishReason.ERROR
    assert len(answers.tokens["r"]) == 5  # 12 places, the last token is not stored
