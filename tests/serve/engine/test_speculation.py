"""Proposed tokens: however good they are, answers are those without, and nothing stale is read."""

from __future__ import annotations

import pytest

from quantkit.errors import UsageError
from quantkit_serve.engine.engine import Engine
from quantkit_serve.phase import Phase
from quantkit_serve.request import FinishReason, Output, Request
from quantkit_serve.split.config import SplitConfig
from quantkit_serve.split.pair import open_pair
from tests.serve.engine.fake import Answers, alone, config, drain, engine, request
from tests.serve.engine.hashes import EOS, VOCAB
from tests.serve.engine.proposing import Choose, mixed, proposing, right, speculative, wrong
from tests.serve.engine.test_preemption import drain_with_progress


def requests(count: int, max_tokens: int = 24, **params: object) -> list[Request]:
    params.setdefault("ignore_eos", True)
    stem = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    return [request(f"r{i}", [*stem[: 5 + i % 5], 20 + i], max_tokens, **params) for i in range(count)]


def served(core: Engine, wanted: list[Request]) -> Answers:
    for one in wanted:
        core.add(one)
    return drain(core)


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("max_tokens", [24, 25, 26, 27])
def test_right_proposals_are_all_accepted(num_tokens: int, max_tokens: int) -> None:
    core, runner = proposing(right, config(), num_tokens)
    (one,) = requests(1, max_tokens)
    assert served(core, [one]).tokens == {"r0": alone(one)}
    figures = core.figures()
    drafts = figures.speculation
    assert figures.decode_steps == -(-(max_tokens - 1) // (1 + num_tokens))
    assert drafts.num_accepted_tokens == drafts.num_draft_tokens == max_tokens - 1 - figures.decode_steps
    assert figures.generated_tokens == max_tokens
    last = max(b.positions.max() for b in runner.batches)
    assert last == len(one.prompt) + max_tokens - 2  # the last token is never computed


@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("choose", [right, wrong])
def test_no_more_pages_than_the_answer_can_fill(choose: Choose, num_tokens: int) -> None:
    core, _ = proposing(choose, config(), num_tokens)  # pages of 4
    core.add(request("a", [5, 6, 7], 14, ignore_eos=True))  # 16 tokens are ever stored
    most = 0
    while core.has_work:
        core.step()
        most = max([most, *(len(s.table) for s in core.scheduler.running)])
    assert most == 4


def test_wrong_proposals_cost_no_step_and_change_nothing() -> None:
    core, _ = proposing(wrong, config(), 2)
    (one,) = requests(1, 25)
    assert served(core, [one]).tokens == {"r0": alone(one)}
    figures = core.figures()
    assert figures.speculation.num_accepted_tokens == 0 < figures.speculation.num_draft_tokens
    assert figures.decode_steps == 24


@pytest.mark.parametrize("choose", [right, wrong, mixed])
@pytest.mark.parametrize(("num_tokens", "pages"), [(1, 14), (2, 14), (3, 20), (1, 64), (4, 64)])
@pytest.mark.parametrize(("deterministic", "prefix"), [(False, True), (True, True), (False, False)])
def test_a_crowd_gets_the_answers_that_each_gets_alone(
    choose: Choose, num_tokens: int, pages: int, deterministic: bool, prefix: bool
) -> None:
    core, _ = proposing(
        choose,
        config(pages=pages, deterministic=deterministic, prefix=prefix, max_num_batched_tokens=7),
        num_tokens,
    )
    wanted = requests(7, 23)
    wanted.append(request("sampled", [5, 6, 7, 8, 9, 10, 11, 30], 12, temperature=0.7, seed=4))
    for one in wanted:
        core.add(one)
    answers = drain_with_progress(core)
    for one in wanted[:-1]:
        assert answers.tokens[one.request_id] == alone(one)
    if pages == 14 and num_tokens == 1:
        assert core.figures().preemptions > 0
    if prefix:
        assert core.figures().cached_tokens > 0


def test_a_page_is_shared_only_with_the_token_behind_it() -> None:
    """Two prompts whose first page is the same and the token behind it not: what the layer left differs."""
    core, _ = proposing(right, config())  # pages of 4
    first, same, other = [5, 6, 7, 8, 9, 1], [5, 6, 7, 8, 9, 2], [5, 6, 7, 8, 10, 1]
    cached = []
    for name, prompt in (("a", first), ("b", same), ("c", other), ("d", other)):
        one = request(name, prompt, 6, ignore_eos=True)
        answers = served(core, [one])
        assert answers.tokens[name] == alone(one)
        cached.append(answers.last[name].num_cached_tokens)
    assert cached == [0, 4, 0, 4]


def test_sampling_requests_leave_pages_that_greedy_ones_can_use() -> None:
    core, _ = proposing(right, config())
    prompt = list(range(10, 23))
    served(core, [request("sampled", prompt, 5, temperature=1.0, seed=1, ignore_eos=True)])
    greedy = request("greedy", prompt, 9, ignore_eos=True)
    answers = served(core, [greedy])
    assert answers.last["greedy"].num_cached_tokens == 12
    assert answers.tokens["greedy"] == alone(greedy)


def merged(outputs: list[Output]) -> list[object]:
    """What a caller has in the end."""
    last = outputs[-1]
    return [
        [t for o in outputs for t in o.token_ids],
        "".join(o.text for o in outputs),
        [p for o in outputs for p in o.logprobs],
        [o.prompt_logprobs for o in outputs if o.prompt_logprobs],
        (last.finish, last.stop_reason, last.num_generated_tokens),
    ]


@pytest.mark.parametrize("choose", [right, mixed])
@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"max_tokens": 0, "prompt_logprobs": 1},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"stop": ("4",)},  # the digits of a later token's text
        {"stop_token_ids": frozenset(range(30, 61))},
        {"stop_token_ids": frozenset(range(20, 61)), "min_tokens": 6},
        {"stop_token_ids": frozenset(range(20, 61)), "min_tokens": 7},
        {"ignore_eos": False, "logit_bias": {EOS: 6.0}},
        {"logit_bias": {17: 9.0, 18: 9.0}},
    ],
)
def test_parameters_mean_what_they_mean_without(choose: Choose, params: dict[str, object]) -> None:
    wanted = requests(5, **{"max_tokens": 20, **params})  # type: ignore[arg-type]
    plain, _ = engine(config())
    expected = served(plain, wanted).all
    for num_tokens in (1, 3):
        core, _ = proposing(choose, config(), num_tokens)
        found = served(core, wanted).all
        for one in wanted:
            assert merged(found[one.request_id]) == merged(expected[one.request_id])


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.5, "seed": 3},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 1.0},
        {"repetition_penalty": 1.2},
    ],
)
def test_some_requests_are_left_out(params: dict[str, object]) -> None:
    (one,) = requests(1, **params)
    plain, _ = engine(config())
    core, runner = proposing(right, config())
    assert served(core, [one]).tokens == served(plain, [one]).tokens
    assert not runner.proposals
    assert core.figures().speculation.num_requests_left_out == 1
    assert core.figures().speculation.num_draft_tokens == 0


def test_nobody_is_preempted_for_proposals() -> None:
    """Two requests that fill the pool to the last page, and not more."""
    core, _ = proposing(wrong, config(pages=8, prefix=False), 4)  # pages of 4
    wanted = [request(f"r{i}", [5, 6, 7, 8 + i], 13, ignore_eos=True) for i in range(2)]
    answers = served(core, wanted)
    assert core.figures().preemptions == 0
    assert [answers.tokens[one.request_id] for one in wanted] == [alone(one) for one in wanted]


def test_a_step_keeps_to_its_budget() -> None:
    core, runner = proposing(right, config(max_num_batched_tokens=6), 3)
    wanted = requests(4, 20)
    answers = served(core, wanted)
    assert max(len(b.token_ids) for b in runner.batches if b.phase is Phase.DECODE) == 6
    assert [answers.tokens[one.request_id] for one in wanted] == [alone(one) for one in wanted]


def test_what_is_not_a_number_behind_a_wrong_token_harms_nobody() -> None:
    (one,) = requests(1, 20)
    tokens = {*one.prompt, *alone(one)}
    broken = next(t for t in range(VOCAB) if t not in tokens)
    core, runner = proposing(lambda logits, position: broken, config(), 2)
    runner.broken = {broken}
    assert served(core, [one]).tokens["r0"] == alone(one)
    assert core.figures().speculation.num_draft_tokens > 0


def test_what_is_not_a_number_behind_a_right_token_is_an_error() -> None:
    (one,) = requests(1, 20)
    whole = alone(one)
    at = next(i for i, token in enumerate(whole) if token not in one.prompt and token not in whole[:i] and i > 3)
    for num_tokens in (1, 2, 3):
        core, runner = proposing(right, config(), num_tokens)
        runner.broken = {whole[at]}
        answers = served(core, [one])
        assert answers.tokens["r0"] == whole[: at + 1]
        assert answers.last["r0"].finish is FinishReason.ERROR


def test_the_pages_of_proposed_tokens_are_checked() -> None:
    core, runner = proposing(right, config(), 1)
    one = request("a", [5, 6, 7], 20, ignore_eos=True)  # 3 of a page's 4
    core.add(one)
    core.step()
    (sequence,) = core.scheduler.running
    assert sequence.num_computed == 3 and len(sequence.drafts) == 1  # token 4 is the next page's
    assert len(sequence.table) == 1
    schedule = core.scheduler.schedule

    def tampering(lane: Phase | None = None) -> object:
        plan = schedule(lane)
        assert len(sequence.table) == 2
        sequence.table[1] = 40
        return plan

    core.scheduler.schedule = tampering  # type: ignore[method-assign,assignment]
    steps = len(runner.batches)
    (output,) = core.step()
    assert output.finish is FinishReason.ERROR and "entry 1 is page 40" in (output.error or "")
    assert len(runner.batches) == steps


def test_a_request_may_be_aborted_while_tokens_are_proposed() -> None:
    core, runner = proposing(right, config(), 3)
    wanted = requests(3, 20)
    for one in wanted:
        core.add(one)
    for _ in range(4):
        core.step()
    runner.aborted = {"r1"}
    runner.between = lambda: core.abort("r1")
    outputs = core.step()
    assert "r1" not in {o.request_id for o in outputs}
    runner.between = lambda: None
    answers = drain(core)
    assert core.figures().finished["length"] == 2
    assert "r1" not in answers.last


def test_a_runner_that_proposes_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="proposes no tokens"):
        engine(speculative(config()))


def test_split_pools_propose_nothing() -> None:
    with pytest.raises(UsageError, match="in one process only"):
        open_pair("nowhere", speculative(config()), SplitConfig())


def test_at_least_one_token_is_proposed() -> None:
    with pytest.raises(UsageError, match="is 0"):
        proposing(right, config(), 0)


def test_who_is_preempted_loses_his_proposals() -> None:
    core, _ = proposing(right, config(pages=14), 1)
    for one in requests(7, 23):
        core.add(one)
    while not core.figures().preemptions:
        core.step()
    (gone,) = [s for s in core.scheduler.waiting if s.num_preemptions]
    assert not gone.drafts
    drain(core)
