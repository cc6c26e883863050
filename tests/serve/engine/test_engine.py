"""The core, step by step, against answers computed without it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from quantkit_serve.batch import Batch, StepLost
from quantkit_serve.engine import choosing
from quantkit_serve.phase import Phase
from quantkit_serve.refusal import Overloaded, Refused
from quantkit_serve.request import FinishReason
from tests.serve.engine.fake import EOS, VOCAB, Answers, alone, config, drain, engine, request


def test_answers_are_those_of_the_request_alone() -> None:
    core, _ = engine()
    requests = [request(f"r{i}", range(5, 5 + 3 * i + 1), 10) for i in range(6)]
    for one in requests:
        core.add(one)
    answers = drain(core)
    for one in requests:
        assert answers.tokens[one.request_id] == alone(one)


def test_the_last_output_says_why_and_how_much() -> None:
    core, _ = engine()
    one = request("r", [7, 8, 9], 5, ignore_eos=True)
    core.add(one)
    last = drain(core).last["r"]
    assert last.finish is FinishReason.LENGTH
    assert (last.num_prompt_tokens, last.num_cached_tokens, last.num_generated_tokens) == (3, 0, 5)


def test_an_end_token_ends_the_answer_and_is_not_text() -> None:
    core, _ = engine()
    one = next(r for a in range(VOCAB) if alone(r := request("r", [a, 9], 30))[-1] == EOS)
    core.add(one)
    answers = drain(core)
    tokens = alone(one)
    assert answers.tokens["r"] == tokens and tokens[-1] == EOS
    assert answers.text["r"] == "".join(f"<{t}>" for t in tokens[:-1])
    assert answers.last["r"].finish is FinishReason.STOP and answers.last["r"].stop_reason is None


def test_a_stop_token_ends_the_answer_and_is_not_text() -> None:
    core, _ = engine()
    tokens = alone(request("r", [7, 8], 20, ignore_eos=True))
    stop = tokens[9]
    core.add(request("r", [7, 8], 20, ignore_eos=True, stop_token_ids=frozenset({stop, EOS + 1})))
    answers = drain(core)
    expected = tokens[: tokens.index(stop) + 1]
    assert answers.tokens["r"] == expected
    assert answers.text["r"] == "".join(f"<{t}>" for t in expected[:-1])
    assert answers.last["r"].finish is FinishReason.STOP and answers.last["r"].stop_reason == stop


def test_end_tokens_wait_for_min_tokens() -> None:
    ends = frozenset(range(40))  # an end token is likely at each place
    core, _ = engine()
    for least in (0, 3, 8):
        core.add(request(f"r{least}", [9, 9], 30, stop_token_ids=ends, min_tokens=least))
    answers = drain(core)
    assert len(answers.tokens["r0"]) < 3
    for least in (3, 8):
        tokens = answers.tokens[f"r{least}"]
        assert len(tokens) > least and not ends & {*tokens[:least]} and tokens[-1] in ends


def test_text_that_waits_for_a_stop_string_is_not_lost_at_the_end() -> None:
    core, _ = engine()
    tokens = alone(request("r", [7, 8], 6, ignore_eos=True))
    text = "".join(f"<{t}>" for t in tokens)
    core.add(request("held", [7, 8], 6, ignore_eos=True, stop=(text[-3:] + "x",)))
    core.add(request("found", [7, 8], 6, ignore_eos=True, stop=(text[5:9],)))
    answers = drain(core)
    assert answers.text["held"] == text and answers.last["held"].finish is FinishReason.LENGTH
    assert answers.text["found"] == text[: text.index(text[5:9])]
    assert answers.last["found"].stop_reason == text[5:9]


def test_without_a_seed_draws_differ() -> None:
    core, _ = engine()
    for i in range(3):
        core.add(request(f"r{i}", [7, 8], 20, temperature=1.0, ignore_eos=True))
        core.add(request(f"s{i}", [7, 8], 20, temperature=1.0, ignore_eos=True, seed=4))
    answers = drain(core)
    assert len({tuple(answers.tokens[f"r{i}"]) for i in range(3)}) == 3
    assert len({tuple(answers.tokens[f"s{i}"]) for i in range(3)}) == 1


def test_a_prompt_longer_than_a_step_is_computed_in_chunks() -> None:
    core, runner = engine(config(max_num_batched_tokens=4))
    one = request("r", range(4, 19), 3, ignore_eos=True)
    core.add(one)
    assert drain(core).tokens["r"] == alone(one)
    sizes = [len(b.token_ids) for b in runner.batches]
    assert sizes == [4, 4, 4, 3, 1, 1]
    assert [b.phase for b in runner.batches] == [Phase.PREFILL] * 4 + [Phase.DECODE] * 2


def test_a_step_is_of_one_phase_and_prompts_share_it() -> None:
    core, runner = engine()
    for i in range(4):
        core.add(request(f"r{i}", [10 + i, 11, 12], 4, ignore_eos=True))
    drain(core)
    assert [len(b.cu_tokens) - 1 for b in runner.batches] == [4, 4, 4, 4]
    assert [b.phase for b in runner.batches] == [Phase.PREFILL, Phase.DECODE, Phase.DECODE, Phase.DECODE]


@pytest.mark.parametrize("between", [1, 3])
def test_between_two_tokens_lie_one_prefill_and_one_decode_step_at_most(between: int) -> None:
    core, runner = engine(config(pages=200, max_num_batched_tokens=4, decode_steps_between_chunks=between))
    core.add(request("early", [5, 6], 60, ignore_eos=True))
    answers = Answers()
    answers.add(core.step())
    for i in range(6):  # far more prompt than decode steps
        core.add(request(f"long{i}", range(1, 40), 5, ignore_eos=True))
    gap = worst = 0
    while "early" not in answers.last or answers.last["early"].finish is None:
        outputs = core.step()
        answers.add(outputs)
        gap += 1
        if any(o.request_id == "early" for o in outputs):
            worst, gap = max(worst, gap), 0
    assert worst == 2
    phases = [b.phase for b in runner.batches[1:40]]
    prefills = [i for i, phase in enumerate(phases) if phase is Phase.PREFILL]
    assert {b - a for a, b in pairwise(prefills)} == {between + 1}  # prompts don't starve either


def test_first_come_first_served() -> None:
    core, _ = engine(config(pages=12, page_size=4, max_num_seqs=2, prefix=False))
    core.add(request("a", range(1, 9), 4, ignore_eos=True))
    core.add(request("big", range(1, 33), 4, ignore_eos=True))  # doesn't fit beside a
    core.add(request("small", [5], 2, ignore_eos=True))  # would
    order = []
    while core.has_work:
        order += [o.request_id for o in core.step() if o.token_ids]
    assert order.index("big") < order.index("small")


def test_the_queue_has_a_limit() -> None:
    core, _ = engine(config(max_num_seqs=2, max_waiting=1))
    for name in "abc":  # two of them will not wait
        core.add(request(name, [5], 4, ignore_eos=True))
    for _ in range(2):
        with pytest.raises(Overloaded, match="1 requests are waiting already"):
            core.add(request("d", [5]))
        core.step()
    drain(core)
    core.add(request("d", [5]))


def test_nobody_needs_to_wait() -> None:
    core, _ = engine(config(max_num_seqs=2, max_waiting=0))
    core.add(request("a", [5], 4, ignore_eos=True))
    core.step()
    core.add(request("b", [5], 4, ignore_eos=True))
    with pytest.raises(Overloaded, match="0 requests"):
        core.add(request("c", [5]))
    drain(core)


def test_a_slot_without_pages_is_no_room() -> None:
    core, _ = engine(config(pages=4, page_size=4, max_waiting=1, prefix=False))
    core.add(request("a", range(1, 9), 8, ignore_eos=True))
    core.add(request("big", range(1, 13), 2, ignore_eos=True))
    core.step()
    core.step()
    assert [s.request_id for s in core.scheduler.waiting] == ["big"]
    with pytest.raises(Overloaded, match="1 requests"):
        core.add(request("c", [5]))
    drain(core)


def test_a_name_is_used_once_at_a_time() -> None:
    core, _ = engine()
    core.add(request("a", [5]))
    with pytest.raises(Refused, match="in use"):
        core.add(request("a", [6]))
    drain(core)
    core.add(request("a", [6]))
    drain(core)


def test_prompts_share_pages_and_answers_stay_the_same() -> None:
    core, runner = engine()
    first, second = request("first", range(1, 12), 4), request("second", [*range(1, 9), 40, 41], 4)
    core.add(first)
    drain(core)
    runner.batches.clear()
    core.add(second)
    answers = drain(core)
    assert answers.tokens["second"] == alone(second)
    assert answers.last["second"].num_cached_tokens == 8
    assert runner.batches[0].token_ids.tolist() == [40, 41]


def test_at_least_one_prompt_token_is_computed() -> None:
    core, runner = engine()
    for name in ("first", "second"):
        one = request(name, range(1, 9), 4)  # two full pages
        core.add(one)
        runner.batches.clear()
        answers = drain(core)
        assert answers.tokens[name] == alone(one)
    assert runner.batches[0].token_ids.tolist() == [5, 6, 7, 8]


def test_a_salt_keeps_prompts_apart() -> None:
    core, _ = engine()
    for name, salt, cached in (("a", "x", 0), ("b", "y", 0), ("c", "x", 8)):
        one = request(name, range(1, 12), 2)
        core.add(type(one)(name, one.prompt, one.params, cache_salt=salt))
        assert drain(core).last[name].num_cached_tokens == cached


def test_generated_tokens_are_not_shared() -> None:
    core, _ = engine()
    first = request("first", range(1, 5), 12, ignore_eos=True)
    core.add(first)
    tokens = drain(core).tokens["first"]
    again = request("again", [*first.prompt, *tokens, 9], 4, ignore_eos=True)
    core.add(again)
    answers = drain(core)
    assert answers.last["again"].num_cached_tokens == 4  # decode weights have made the rest
    assert answers.tokens["again"] == alone(again)


def test_no_answer_at_all() -> None:
    core, _ = engine()
    core.add(request("r", [5, 6, 7], 0))
    answers = drain(core)
    assert answers.tokens["r"] == [] and answers.last["r"].finish is FinishReason.LENGTH


def test_nan_ends_one_request_and_no_other() -> None:
    core, runner = engine()
    runner.broken = {50}
    good, bad = request("good", [5, 6], 6), request("bad", [6, 50], 6)
    core.add(good)
    core.add(bad)
    answers = drain(core)
    assert answers.last["bad"].finish is FinishReason.ERROR
    assert "not a finite number" in (answers.last["bad"].error or "")
    assert answers.tokens["good"] == alone(good)


def test_deadlines_end_waiting_and_running_requests() -> None:
    now = [0.0]
    core, _ = engine(config(max_num_seqs=1), clock=lambda: now[0])
    for name in ("running", "waiting"):
        one = request(name, [5], 50, ignore_eos=True)
        core.add(type(one)(name, one.prompt, one.params, deadline_s=2.0))
    answers = Answers()
    answers.add(core.step())
    now[0] = 2.0
    answers.add(core.step())
    assert not core.has_work
    for name in ("running", "waiting"):
        assert answers.last[name].finish is FinishReason.ERROR and "deadline of 2.0 s" in (
            answers.last[name].error or ""
        )
        assert answers.last[name].error_status == 504


@pytest.mark.parametrize("step", [0, 1, 2])
def test_an_abort_while_the_step_runs_leaves_its_pages_alone_until_it_has_landed(step: int) -> None:
    core, runner = engine()
    other = request("other", [7, 8, 9], 6)
    core.add(request("gone", range(1, 30), 20, ignore_eos=True))
    core.add(other)
    answers = Answers()
    seen = []

    def abort(batch: Batch) -> None:
        if len(runner.batches) == step + 1:
            pages = core.figures().num_pages_used
            output = core.abort("gone")
            assert output is not None and output.finish is FinishReason.ABORT
            answers.add([output])
            figures = core.figures()
            seen.append(figures.num_pages_quarantined)
            assert figures.num_pages_quarantined + figures.num_pages_used <= pages
            free = set(core.pool._free)
            assert not free & set(batch.block_table[0].tolist())

    runner.before = abort
    drain(core, answers)
    assert len(seen) == 1 and (step == 0) <= (seen[0] > 0)
    assert answers.tokens["other"] == alone(other)
    assert core.abort("gone") is None


def test_only_pages_of_the_step_are_in_flight() -> None:
    """Rows of the block table end in what earlier sequences left there."""
    core, runner = engine(config(max_num_seqs=2))
    core.add(request("a", range(1, 30), 3, ignore_eos=True))
    core.add(request("b", range(30, 60), 3, ignore_eos=True))
    drain(core)
    core.add(request("short", [50], 6, ignore_eos=True))
    core.add(request("long", range(5, 40), 6, ignore_eos=True))
    checked = []

    def check(batch: Batch) -> None:
        held = {page for s in core.scheduler.running for page in s.table}
        checked.append(set(batch.block_table.ravel().tolist()) - held)
        assert {page for page in range(core.pool.num_pages) if core.pool.is_in_flight(page)} <= held

    runner.before = check
    drain(core)
    assert any(checked)  # there was something else in the table


def test_an_abort_between_step_and_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    core, _ = engine()
    core.add(request("gone", [5, 6], 6))
    core.add(request("other", [7, 8], 6))
    aborted = []

    def late(logits, rows, eos):  # type: ignore[no-untyped-def]
        chosen = choosing.choose(logits, rows, eos)
        aborted.append(core.abort("gone"))
        return chosen

    monkeypatch.setattr("quantkit_serve.engine.engine.choose", late)
    answers = drain(core)
    assert aborted[0].finish is FinishReason.ABORT
    assert "gone" not in answers.tokens and answers.tokens["other"] == alone(request("other", [7, 8], 6))


def test_whoever_ends_it_the_text_is_whole() -> None:
    """A stop string that all text may be the start of holds all of it back."""
    tokens = alone(request("r", [7, 8], 9, ignore_eos=True))
    text = "".join(f"<{t}>" for t in tokens)
    now = [0.0]
    core, _ = engine(clock=lambda: now[0])
    late = request("late", [7, 8], 9, ignore_eos=True, stop=(text,))
    core.add(type(late)("late", late.prompt, late.params, deadline_s=5))
    core.add(request("gone", [7, 8], 9, ignore_eos=True, stop=(text,)))
    answers = Answers()
    for _ in range(4):
        answers.add(core.step())
    assert answers.text == {"late": "", "gone": ""}
    output = core.abort("gone")
    assert output is not None
    now[0] = 9.0
    answers.add([output, *core.step()])
    assert answers.text == dict.fromkeys(("late", "gone"), "".join(f"<{t}>" for t in tokens[:4]))


def test_steps_with_prompt_logprobs_are_kept_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit_serve.engine.engine.LOGIT_BYTES", 4 * VOCAB * 5)
    core, runner = engine()
    for name in ("a", "b", "c"):
        core.add(request(name, range(1, 12), 3, ignore_eos=True, prompt_logprobs=0 if name != "c" else None))
    answers = drain(core)
    assert max(len(b.logit_rows) for b in runner.batches) <= 5 + 3  # and the next tokens' own
    assert len(answers.all["a"][0].prompt_logprobs or ()) == 11
    for name in ("a", "b", "c"):
        assert answers.tokens[name] == alone(request(name, range(1, 12), 3, ignore_eos=True))


def test_figures() -> None:
    core, _ = engine(config(max_num_seqs=1))
    core.add(request("a", range(1, 9), 3, ignore_eos=True))
    core.add(request("b", range(1, 9), 3, ignore_eos=True))
    core.step()
    figures = core.figures()
    assert (figures.num_running, figures.num_waiting, figures.num_pages_used, figures.num_pages) == (1, 1, 2, 64)
    assert set(figures.pages.values()) == {"a"}
    drain(core)
    figures = core.figures()
    assert (figures.prompt_tokens, figures.cached_tokens, figures.generated_tokens) == (16, 4, 6)
    assert (figures.prefill_steps, figures.decode_steps) == (2, 4)
    assert figures.finished == {"length": 2, "stop": 0, "abort": 0, "error": 0}
    assert figures.kv_tag_checks == 6 and figures.kv_tag_mismatches == 0
    assert [s[2:] for s in figures.steps[:2]] == [("prefill", 1, 8), ("decode", 1, 1)]


def test_a_lost_step_ends_its_requests_only() -> None:
    core, runner = engine(config(decode_steps_between_chunks=3))
    a, b = request("a", [1, 2, 3], 6, ignore_eos=True), request("b", [4, 5], 6, ignore_eos=True)
    core.add(a)
    answers = Answers()
    answers.add(core.step())

    def lose(batch: Batch) -> None:
        if batch.phase is Phase.PREFILL:
            runner.before = lambda batch: None
            raise StepLost("the worker has ended")

    runner.before = lose
    core.add(b)
    drain(core, answers)
    assert answers.tokens["a"] == alone(a)
    assert answers.last["b"].finish is FinishReason.ERROR
    assert answers.last["b"].error == "its step was lost: the worker has ended"
    core.add(request("b", [4, 5], 6, ignore_eos=True))
    assert drain(core).tokens["b"] == alone(b)
