"""What is refused, and with which words."""

from __future__ import annotations

import dataclasses
import math

import pytest

from quantkit.errors import UsageError
from quantkit_serve.config import CacheConfig, EngineConfig, SchedulerConfig
from quantkit_serve.engine.limits import Limits
from quantkit_serve.refusal import Refused
from quantkit_serve.request import Grammar
from tests.serve.engine.fake import PAGE_BYTES, FakeRunner, alone, config, drain, engine, request

FACTS = FakeRunner(page_size=4, max_model_len=100).facts
LIMITS = Limits.of(FACTS, config(pages=20))  # 80 tokens in the pool


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 10**12),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 9),  # above max_tokens
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", "1"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 2.0),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("presence_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {61: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("seed", 1 << 64),
        ("seed", -(1 << 63) - 1),
        ("stop", ("",)),
        ("stop", ("x" * 2000,)),
        ("stop", ("x",) * 17),
        ("stop_token_ids", frozenset({61})),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
    ],
)
def test_parameters_out_of_range(param: str, value: object) -> None:
    wanted = request("r", [5])
    wanted = dataclasses.replace(wanted, params=dataclasses.replace(wanted.params, **{param: value}))  # type: ignore[arg-type]
    with pytest.raises(Refused) as refused:
        LIMITS.check(wanted)
    assert refused.value.param == param and refused.value.status == 400
    assert param in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 1e300},
        {"temperature": 5e-324},
        {"temperature": 0},
        {"top_p": 1},
        {"seed": (1 << 64) - 1},
        {"seed": -(1 << 63)},
        {"logit_bias": {60: -100}},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"stop": ("x" * 1024,) * 16},
    ],
)
def test_parameters_at_the_edge_work(given: dict[str, object]) -> None:
    core, _ = engine()
    core.add(request("r", [5], 3, **given))
    drain(core)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ((), 1, "at least one token"),
        ((61,), 1, "prompt has the token 61; ids are from 0 to 60"),
        ((-1,), 1, "prompt has the token -1"),
        ((True,), 1, "prompt has the token True"),
        ((5,) * 101, 0, "the prompt has 101 tokens; this model takes at most 100"),
        ((5,) * 81, 0, "the prompt has 81 tokens; the KV cache of this server holds 80"),
        ((5,) * 80, 2, "max_tokens is 2, but a prompt of 80 tokens leaves room for 1: the KV cache"),
        ((5,), 10**12, "max_tokens is 1000000000000, but a prompt of 1 tokens leaves room for 80"),
    ],
)
def test_prompts_that_do_not_fit(prompt: tuple[int, ...], max_tokens: int, message: str) -> None:
    with pytest.raises(Refused, match=message):
        LIMITS.check(request("r", prompt, max_tokens))


def test_the_context_is_of_prompt_and_answer() -> None:
    limits = Limits.of(FACTS, config(pages=1000))
    prompt = [5] * 99
    limits.check(request("r", prompt, 1))
    limits.check(request("r", [*prompt, 5], 0))
    with pytest.raises(Refused, match="a prompt of 99 tokens leaves room for 1: this model takes 100 tokens"):
        limits.check(request("r", prompt, 2))


@pytest.mark.parametrize(("prompt", "max_tokens"), [(80, 0), (80, 1), (1, 80), (40, 41)])
def test_what_just_fits_the_pool_is_served(prompt: int, max_tokens: int) -> None:
    core, _ = engine(config(pages=20))
    one = request("r", [5] * prompt, max_tokens, ignore_eos=True)
    other = request("other", [6] * prompt, max_tokens, ignore_eos=True)
    core.add(one)
    core.add(other)
    answers = drain(core)
    assert answers.tokens["r"] == alone(one) and answers.tokens["other"] == alone(other)


def test_a_grammar_needs_its_end_tokens() -> None:
    for param, value in (("ignore_eos", True), ("min_tokens", 2)):
        with pytest.raises(Refused, match=param):
            LIMITS.check(request("r", [5], grammar=Grammar("json_object"), **{param: value}))


@pytest.mark.parametrize("deadline", [0.0, -1.0, math.nan, math.inf])
def test_deadlines_lie_ahead(deadline: float) -> None:
    with pytest.raises(Refused, match="deadline_s"):
        LIMITS.check(dataclasses.replace(request("r", [5]), deadline_s=deadline))


def test_a_salt_is_text() -> None:
    with pytest.raises(Refused, match="cache_salt"):
        LIMITS.check(dataclasses.replace(request("r", [5]), cache_salt="\ud800"))


@pytest.mark.parametrize(
    ("where", "settings"),
    [
        ("max_num_seqs", EngineConfig(scheduler=SchedulerConfig(max_num_seqs=0))),
        ("max_num_batched_tokens", EngineConfig(scheduler=SchedulerConfig(max_num_batched_tokens=0))),
        ("decode_steps_between_chunks", EngineConfig(scheduler=SchedulerConfig(decode_steps_between_chunks=0))),
        ("max_waiting", EngineConfig(scheduler=SchedulerConfig(max_waiting=-1))),
        ("max_model_len", EngineConfig(scheduler=SchedulerConfig(max_model_len=0))),
        ("max_model_len", EngineConfig(scheduler=SchedulerConfig(max_model_len=101))),
        ("page_size", EngineConfig(cache=CacheConfig(page_size=0))),
        ("kv_bytes", EngineConfig(cache=CacheConfig(kv_bytes=PAGE_BYTES - 1))),
    ],
)
def test_configurations_that_can_not_work(where: str, settings: EngineConfig) -> None:
    with pytest.raises(UsageError) as error:
        Limits.of(FACTS, settings)
    assert error.value.where == where
