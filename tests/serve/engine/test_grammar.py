"""Answers of a model that knows nothing (random logits) follow grammars; what can't be enforced is refused."""

from __future__ import annotations

import asyncio
import json
import re
from functools import cache

import pytest
from tokenizers import Tokenizer

from quantkit.data import bundled_model
from quantkit_serve.engine.engine import Engine
from quantkit_serve.engine.grammar import MAX_DEPTH, Compiler
from quantkit_serve.engine.loop import EngineService
from quantkit_serve.engine.vocabulary import Vocabulary
from quantkit_serve.refusal import Refused
from quantkit_serve.request import FinishReason, Grammar, Request
from tests.serve.engine.fake import FakeRunner, config, drain, request
from tests.serve.engine.fake import engine as any_engine

VOCAB = 4096
ENDS = frozenset({0, 4})
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zé]{1,6}$"},
        "kind": {"enum": ["cat", "dog", "😀"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "kind", "count", "tags"],
    "additionalProperties": False,
}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(bundled_model("tiny-glm") / "tokenizer.json"))


@cache
def compiler() -> Compiler:
    return Compiler(tokenizer().to_str(), VOCAB, ENDS)


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary.of(tokenizer())


def engine(**settings: int) -> Engine:
    runner = FakeRunner(page_size=4, vocab=VOCAB, eos=0)
    core, _ = any_engine(config(**settings), runner, vocabulary=vocabulary(), compiler=compiler())
    return core


def constrained(name: str, grammar: Grammar, max_tokens: int = 100, **params: object) -> Request:
    params.setdefault("temperature", 1.0)
    params.setdefault("seed", 1)
    return request(name, [10, 11], max_tokens, grammar=grammar, **params)


def schema(value: object) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_follows_its_schema(temperature: float) -> None:
    core = engine(pages=400)
    for seed in range(8):
        core.add(constrained(f"r{seed}", schema(SCHEMA), seed=seed, temperature=temperature))
    answers = drain(core)
    assert temperature == 0 or len(set(answers.text.values())) > 4
    for name, text in answers.text.items():
        assert answers.last[name].finish is FinishReason.STOP
        found = json.loads(text)
        assert list(found) == ["name", "kind", "count", "tags"]
        assert re.fullmatch("[a-zé]{1,6}", found["name"]) and found["kind"] in ("cat", "dog", "😀")
        assert 0 <= found["count"] <= 99 and len(found["tags"]) <= 3 and {*found["tags"]} <= {True, False}


@pytest.mark.parametrize("pattern", ["[a-f]{3}-[0-9]{2}", "yes|no", "(ab)*", "[😀é]{2,4}"])
def test_text_matches_its_pattern(pattern: str) -> None:
    core = engine(pages=400)
    for seed in range(6):
        core.add(constrained(f"r{seed}", Grammar("regex", pattern), seed=seed))
    answers = drain(core)
    for name, text in answers.text.items():
        if answers.last[name].finish is FinishReason.STOP:
            assert re.fullmatch(pattern, text)
    assert sum(last.finish is FinishReason.STOP for last in answers.last.values()) >= 3


def test_any_json_is_an_object() -> None:
    core = engine(pages=400)
    brace = tokenizer().encode("}").ids[0]
    core.add(constrained("r", Grammar("json_object"), 90, logit_bias={brace: 14.0}))
    answers = drain(core)
    assert answers.last["r"].finish is FinishReason.STOP and isinstance(json.loads(answers.text["r"]), dict)


def test_what_is_complete_ends_without_an_end_token() -> None:
    core = engine()
    core.add(constrained("r", Grammar("regex", "abc")))
    answers = drain(core)
    assert answers.text["r"] == "abc" and answers.last["r"].finish is FinishReason.STOP
    assert not ENDS & {*answers.tokens["r"]}


def test_stop_strings_and_lengths_end_it_earlier() -> None:
    core = engine()
    core.add(constrained("stop", Grammar("regex", "abcdef"), stop=("d",)))
    core.add(constrained("length", schema(SCHEMA), 3))
    answers = drain(core)
    assert answers.text["stop"] == "abc" and answers.last["stop"].stop_reason == "d"
    assert answers.last["length"].finish is FinishReason.LENGTH and len(answers.tokens["length"]) == 3


def test_grammars_survive_preemption_and_leave_others_alone() -> None:
    requests = [constrained(f"g{i}", schema(SCHEMA), 60, seed=i) for i in range(4)]
    requests += [request(f"f{i}", [20 + i, 7], 40, ignore_eos=True, temperature=0.8, seed=i) for i in range(3)]
    texts = []
    for one in requests:
        core = engine(pages=400)
        core.add(one)
        texts.append(drain(core).text[one.request_id])
    core = engine(pages=24)
    for one in requests:
        core.add(one)
    answers = drain(core)
    assert core.figures().preemptions
    assert [answers.text[one.request_id] for one in requests] == texts


def nested(depth: int) -> object:
    found: object = {"type": "integer"}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found}, "required": ["a"], "additionalProperties": False}
    return found


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("json_schema", "nope"), "json_schema is not JSON"),
        (Grammar("json_schema", ""), "json_schema is not JSON"),
        (Grammar("json_schema", "[1]"), "an object or true, got list"),
        (schema({"type": "wat"}), "json_schema: Invalid type: wat"),
        (schema({"not": {}}), "json_schema: Unimplemented keys"),
        (schema({"$ref": "#/nowhere"}), "json_schema: Pointer"),
        (schema({"type": "string", "pattern": "(?=a)b"}), "json_schema: .*look-behind, is not supported"),
        (schema(False), "which allows nothing"),
        (schema({"not": {}, "x-guidance": {"lenient": True}}), "Unimplemented keys"),
        (schema({"enum": ["\ud800"]}), "json_schema"),
        (Grammar("regex", "\ud800"), "regex"),
        (schema(nested(64)), "json_schema is nested 129 deep; at most 120"),
        (Grammar("json_schema", "[" * 60_000), "nested 60000 deep"),
        (Grammar("json_schema", " " * 70_000), "70000 characters"),
        (Grammar("regex", "("), "regex: .*unclosed group"),
        (Grammar("regex", "(?=a)b"), "regex: .*look-ahead and look-behind, is not supported"),
        (Grammar("regex", r"(a)\1"), "regex: .*backreferences are not supported"),
        (Grammar("regex", "a" * 70_000), "70000 characters"),
    ],
)
def test_what_can_not_be_enforced_is_refused(grammar: Grammar, message: str) -> None:
    core = engine()
    with pytest.raises(Refused, match=message) as refused:
        core.add(constrained("r", grammar))
    assert refused.value.param == "response_format" and not core.has_work
    assert "\n" not in str(refused.value)


def test_a_refusal_names_the_field_that_asked() -> None:
    with pytest.raises(Refused) as refused:
        engine().add(constrained("r", Grammar("regex", "(", "guided_regex")))
    assert refused.value.param == "guided_regex"


def test_deep_schemas_are_enforced() -> None:
    depth = (MAX_DEPTH - 1) // 2
    core = engine(pages=800)
    likely = dict.fromkeys(tokenizer().encode('{"a":}').ids, 20.0)
    core.add(constrained("r", schema(nested(depth)), 1000, logit_bias=likely))
    answers = drain(core)
    assert re.fullmatch(r'(\{"a":){59}-?\d+\}{59}', re.sub(r"\s", "", answers.text["r"])) and depth == 59


@pytest.mark.parametrize("pattern", ["(a{1000}){300}", "(a|b|ab)*c{3000}", "((((a*)*)*)*)*"])
def test_monsters_are_refused_or_bounded(pattern: str) -> None:
    core = engine()
    try:
        core.add(constrained("r", Grammar("regex", pattern), 5))
    except Refused:
        return
    assert drain(core).last["r"].finish is not None


def test_without_a_compiler_grammars_are_refused() -> None:
    core, _ = any_engine()
    with pytest.raises(Refused, match="enforces no grammars"):
        core.add(request("r", [5], grammar=Grammar("json_object")))


def test_in_the_loop_a_refusal_comes_before_the_first_output() -> None:
    async def run() -> None:
        service = EngineService(engine())
        await service.start()
        with pytest.raises(Refused, match="regex"):
            await anext(service.submit(constrained("bad", Grammar("regex", "("))))
        good = [output async for output in service.submit(constrained("good", Grammar("regex", "abc")))]
        assert "".join(output.text for output in good) == "abc"
        stream = service.submit(constrained("gone", Grammar("regex", "abc")))
        service.abort("gone")
        assert [output.finish async for output in stream] == [FinishReason.ABORT]
        assert service.figures().num_running == 0
        await service.stop()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_grammar_that_gives_up_is_the_askers_fault() -> None:
    """It compiles, and is too large once it is followed; only its own request ends."""
    core = engine()
    core.add(constrained("large", Grammar("regex", "(a{1000}){1000}")))
    core.add(constrained("other", Grammar("regex", "[ab]{5}")))
    answers = drain(core)
    assert answers.last["large"].finish is FinishReason.ERROR and answers.last["large"].error_status == 400
    assert answers.last["other"].finish is FinishReason.STOP
