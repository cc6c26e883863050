"""Any server that speaks OpenAI's ``/v1/completions`` as a candidate: ours, vLLM, SGLang.

Continuations are scored with ``echo`` and ``logprobs``. Prompts are token ids, made by the model's own tokenizer,
so that a continuation begins where it does for every other candidate; for servers that take text alone, text,
whose tokens are then counted. How the server computes is its business: the path of its scores is "unknown", and no
claim about decode can rest on them.

lm-eval's ``local-completions`` does much of this, but cuts what is too long, and gives up without saying what was
done; answers here go through the same cache as everybody's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quantkit.errors import EnvironmentProblem, UsageError

from ..tokenizer import load_tokenizer
from .at_once import at_once
from .candidate import OnProgress, TaskPath
from .echoed import TOPS, SameText, scored
from .generation import Prompt
from .pair import Pair, Scored
from .retrying import Retrying

if TYPE_CHECKING:
    import httpx
    from lm_eval.api.model import TemplateLM

TIMEOUT_S = 300.0
_KEY = "OPENAI_API_KEY"
_AT_ONCE = 8  # pairs of one request
_SAME_TEXT = (
    "the endpoint tells tokens by their text, and some that are no text by themselves have the same, so that "
    "the most likely one can't be told"
)
_LEAST = 4  # tokens that any question takes


class EndpointCandidate:
    """See ``Candidate``.

    Args:
        url: of the server, with or without ``/v1``.
        tokenizer: folder with the tokenizer of the model that the server has.
        model: that the server calls so; None if it has just one.
        max_length: tokens of prompt and answer that the server takes; None: what it says itself, or else what
            the model was made for. It refuses what is longer, so that nothing is cut either way.
        sends: prompts as token ids or as text.
        concurrency: requests at a time.
        transport, sleep: for tests.
    """

    path: TaskPath = "unknown"

    def __init__(
        self,
        url: str,
        *,
        tokenizer: Path,
        model: str | None = None,
        label: str | None = None,
        max_length: int | None = None,
        sends: Literal["ids", "text"] = "ids",
        concurrency: int = 4,
        timeout_s: float = TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self.url = _address(url)
        self._model, self._label, self._max_length = model, label, max_length
        self._folder, self._sends, self._concurrency = tokenizer, sends, concurrency
        settings: dict[str, Any] = {} if sleep is None else {"sleep": sleep}
        self._server = Retrying(self.url, api_key=_key(), timeout_s=timeout_s, transport=transport, **settings)

    @property
    def label(self) -> str:
        return self._label or f"{self.model} at {self.url}"

    @cached_property
    def _listed(self) -> dict[str, Any]:
        """The model's entry of ``/v1/models``."""
        answer = self._server.ask("GET", "/models")
        found = answer.get("data") if isinstance(answer, dict) else None
        listed = found if isinstance(found, list) else []
        models = [one for one in listed if isinstance(one, dict) and _is_text(one.get("id"))]
        if not models:
            raise EnvironmentProblem("the server lists no model", where=f"{self.url}/models")
        names = ", ".join(one["id"] for one in models)
        if self._model is None and len(models) != 1:
            raise UsageError(f"the server has {len(models)} models", where=self.url, accepted=names)
        chosen = next((one for one in models if self._model in (None, one["id"])), None)
        if chosen is None:
            raise UsageError(f"the server has no model {self._model!r}", where=self.url, accepted=names)
        return chosen

    @property
    def model(self) -> str:
        return str(self._listed["id"])

    def identity(self) -> dict[str, Any]:
        """A server doesn't say which weights it has: the same URL and model count as the same candidate."""
        listed = {
            name: value
            for name, value in self._listed.items()
            if name != "created" and (value is None or isinstance(value, int) or _is_text(value))
        }
        return {
            "label": self.label, "kind": "endpoint", "model": self.model, "url": self.url, "listed": listed,
            "sends": self._sends,
        }  # fmt: skip

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self._folder)

    @cached_property
    def _room(self) -> int:
        """Tokens of prompt and answer."""
        found = self._max_length or self._listed.get("max_model_len") or _model_room(self._folder)
        if isinstance(found, bool) or not isinstance(found, int) or found < _LEAST:
            raise EnvironmentProblem(
                f"the server does not say how many tokens it takes (max_model_len is {found!r:.60})",
                where=self.url, accepted=f"a whole number from {_LEAST}",
            )  # fmt: skip
        return found

    @property
    def max_length(self) -> int:
        """A prompt that is scored has all tokens of a pair, and the server generates one more."""
        return self._room - 2

    def state(self) -> str:
        return ""

    def refusal(self, pair: Pair) -> str | None:
        if pair.num_tokens >= self._room:
            return f"{pair.num_tokens} tokens and one that is generated, the endpoint takes {self._room}"
        return None

    def refusal_of_prompt(self, prompt: Prompt) -> str | None:
        answer = prompt.generation.max_tokens
        if len(prompt.tokens) + answer > self._room:
            return f"{len(prompt.tokens)} tokens and an answer of {answer}, the endpoint takes {self._room}"
        return None

    def score(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, Scored]]:
        order = sorted(range(len(pairs)), key=lambda i: (-pairs[i].num_tokens, pairs[i].context))
        groups = [order[start : start + _AT_ONCE] for start in range(0, len(order), _AT_ONCE)]
        for found in at_once(groups, lambda group: self._score_some(group, pairs), self._concurrency):
            yield from found

    def _score_some(self, group: Sequence[int], pairs: Sequence[Pair]) -> list[tuple[int, Scored]]:
        tokens = [[*pairs[i].context, *pairs[i].continuation] for i in group]
        body = {
            "model": self.model, "prompt": tokens if self._sends == "ids" else [self._text(t) for t in tokens],
            "max_tokens": 1, "temperature": 0, "logprobs": TOPS, "echo": True,
        }  # fmt: skip
        try:
            return self._scored(group, pairs, body)
        except SameText:  # vLLM can tell tokens by their ids; others refuse, or don't hear
            try:
                return self._scored(group, pairs, body | {"return_tokens_as_token_ids": True})
            except SameText:
                raise EnvironmentProblem(_SAME_TEXT, where=self.url) from None
            except EnvironmentProblem as error:
                raise EnvironmentProblem(
                    error.what, where=error.where, hint=f"It was asked for token ids: {_SAME_TEXT}."
                ) from None

    def _scored(
        self, group: Sequence[int], pairs: Sequence[Pair], body: dict[str, Any]
    ) -> list[tuple[int, Scored]]:
        choices = self._choices(self._server.ask("POST", "/completions", body), len(group))
        return [(i, scored(i, pairs[i], choice, self.url)) for i, choice in zip(group, choices, strict=True)]

    def generate(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, str]]:
        return at_once(range(len(prompts)), lambda index: (index, self._answer(prompts[index])), self._concurrency)

    def _answer(self, prompt: Prompt) -> str:
        made = prompt.generation
        body: dict[str, Any] = {
            "model": self.model, "prompt": list(prompt.tokens) if self._sends == "ids" else prompt.text,
            "max_tokens": made.max_tokens, "temperature": made.temperature, "stop": list(made.stop) or None,
        }  # fmt: skip
        if made.is_sampled:
            body |= {"seed": prompt.seed, "top_p": made.top_p}
        for name, default in (
            ("top_k", 0),
            ("min_p", 0.0),
            ("repetition_penalty", 1.0),
        ):  # not all servers know them
            if (value := getattr(made, name)) != default:
                body[name] = value
        if made.json_schema:
            import json

            schema = {"name": "answer", "schema": json.loads(made.json_schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        (choice,) = self._choices(self._server.ask("POST", "/completions", body), 1)
        if not isinstance(choice.get("text"), str):
            raise EnvironmentProblem("the endpoint gives no text", where=self.url)
        return str(choice["text"])

    def _choices(self, answer: Any, count: int) -> list[dict[str, Any]]:
        found = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(found, list) or len(found) != count or not all(isinstance(c, dict) for c in found):
            raise EnvironmentProblem(f"the endpoint does not give {count} choices", where=self.url)
        numbered = [choice.get("index", 0 if count == 1 else None) for choice in found]
        if sorted(map(str, numbered)) != sorted(map(str, range(count))):
            raise EnvironmentProblem(f"the endpoint numbers {count} choices {numbered}", where=self.url)
        return sorted(found, key=lambda choice: int(choice.get("index", 0)))

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def lm(self, *, cache: Path | None = None, on_progress: OnProgress = lambda _: None) -> TemplateLM:
        from ..harness.lm_eval_model import HarnessModel

        return HarnessModel(self, cache=cache, on_progress=on_progress)


def _address(url: str) -> str:
    """The server's, with ``/v1``. It stands in reports, so that it may hold no password.

    Raises:
        UsageError: no such URL.
    """
    import httpx

    accepted = "http://HOST:PORT or https://..."
    try:
        found = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UsageError(f"is no URL of a server: {error}", where=repr(url), accepted=accepted) from None
    if found.scheme not in ("http", "https") or not found.host:
        raise UsageError("is no URL of a server", where=url, accepted=accepted)
    if found.userinfo or found.query or found.fragment:
        raise UsageError(
            "has more than a server's address, and reports show it", where=f"{found.scheme}://{found.host}/...",
            accepted=accepted, hint=f"A key goes into the variable {_KEY}.",
        )  # fmt: skip
    base = url.rstrip("/")
    return base if base.endswith("/v1") else f"{base}/v1"


def _is_text(value: object) -> bool:
    """That a report can hold: no half of a surrogate pair, which JSON lets a server send."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _key() -> str | None:
    """What authorizes requests; white space around it comes from files.

    Raises:
        EnvironmentProblem: no header can hold it. It is not shown.
    """
    found = os.environ.get(_KEY, "").strip()
    if not all("!" <= character <= "~" for character in found):
        raise EnvironmentProblem("holds characters that no key has", where=_KEY, accepted="printable ASCII")
    return found or None


def _model_room(folder: Path) -> Any:
    """Positions that the model's configuration states; None if it states none."""
    from quantkit.artifact.canonical import parse_json

    try:
        config = parse_json((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    text = config.get("text_config", config) if isinstance(config, dict) else {}
    return text.get("max_position_embeddings") if isinstance(text, dict) else None
