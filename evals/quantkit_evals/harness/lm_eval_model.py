"""A candidate as lm-eval sees it: the adapter, in one file.

Text becomes tokens exactly as lm-eval's own ``hf`` model makes them (trailing spaces of a context go to the
continuation, both are encoded together and cut at the context's length, an empty context is the prefix token, long
texts are windows of lm-eval's own utility), so that figures can be compared with anybody's. It differs in this:
what is too long for the model is not cut. Its request gets a stand-in for an answer, and ``answers.skipped`` says
why; whoever reads lm-eval's results must leave these items out.

Requests that are equal are computed once, and answers are kept (``answers``). An empty continuation or text, a
generation argument that is unknown, logits that are not numbers: one error that names task and item.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from quantkit.errors import UsageError

from ..candidates.candidate import Candidate, OnProgress
from ..candidates.generation import Prompt, parse_generation
from ..candidates.pair import Pair, Scored
from .answers import Answers, Kind, Place


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm-eval is untyped to us
    """See the module.

    Args:
        cache: folder of kept answers; None keeps none.
        seed: of sampled answers.
        add_bos_token: as lm-eval's ``hf``; None leaves it to the tokenizer.
        window: of long texts, in tokens, so that others who take less are asked the same; None: all that the
            candidate takes.

    Attributes:
        answers: what it has answered, and what it could not.
        windows: of each text that was longer than a window, a digest of how it was cut.
        scored_tokens: of each task, (tokens scored, those of them that a decode step gave).
    """

    def __init__(
        self,
        candidate: Candidate,
        *,
        cache: Path | None = None,
        on_progress: OnProgress = lambda _: None,
        seed: int = 0,
        add_bos_token: bool | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.candidate, self.tokenizer = candidate, candidate.tokenizer
        self.answers = Answers(candidate, cache, on_progress)
        self.scored_tokens: dict[str, tuple[int, int]] = {}
        self.windows: dict[Place, str] = {}
        self._seed, self._add_bos_token, self._window = seed, add_bos_token, window

    # -- what lm-eval asks of any model

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise UsageError(
            "the tokenizer has neither a first nor a last token, of which one begins a text that has no context",
            where=self.candidate.label,
        )

    @cached_property
    def _prefix_text(self) -> str:
        return str(self.tokenizer.decode(self.prefix_token_id))

    @property
    def max_length(self) -> int:
        taken = self.candidate.max_length
        return taken if self._window is None else min(self._window, taken)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        settings = {}
        if add_special_tokens is None:
            if string.startswith(self._prefix_text):
                settings["add_special_tokens"] = False
            elif self._add_bos_token is not None:
                settings["add_special_tokens"] = self._add_bos_token
        else:
            settings["add_special_tokens"] = add_special_tokens
        found: list[int] = self.tokenizer.encode(string, **settings)
        return found

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """As the tokenizer has it.

        Raises:
            UsageError: it has none, or the template refuses the messages.
        """
        if not self.tokenizer.chat_template:
            raise UsageError("the model has no chat template", where=self.candidate.label)
        import jinja2

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    chat_history,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )
        except jinja2.exceptions.TemplateError as error:
            raise UsageError(f"the chat template refuses messages: {error}", where=self.candidate.label) from None

    # -- requests

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        asked = []
        for request in requests:
            context, continuation = request.args
            pair = self._pair(context, continuation)
            if not pair.continuation:
                raise UsageError(
                    f"has the empty continuation {continuation!r}: there is nothing to score",
                    where=self._name(request),
                )
            if not pair.context:
                raise UsageError(
                    f"has the context {context!r}, which is no token: there is nothing to score behind",
                    where=self._name(request),
                )
            asked.append((request, pair))
        return [(found.logprob, found.is_greedy) for found in self._score(asked)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        asked, counts = [], []
        for request in requests:
            (text,) = request.args
            windows = [
                Pair(tuple(context), tuple(continuation))
                for context, continuation in map(
                    make_disjoint_window,
                    get_rolling_token_windows(
                        token_list=self.tok_encode(text),
                        prefix_token=self.prefix_token_id,
                        max_seq_len=self.max_length,
                        context_len=1,
                    ),
                )
            ]
            if not windows:
                raise UsageError("has an empty text: there is nothing to score", where=self._name(request))
            if len(windows) > 1:  # one is the whole text, however many tokens a tokenizer makes of it
                self.windows[_place(request)] = _digest(windows)
            asked += [(request, window) for window in windows]
            counts.append(len(windows))
        found = iter(self._score(asked))
        return [sum(next(found).logprob for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        asked: list[tuple[Instance, Prompt]] = []
        times: Counter[str] = Counter()
        for request in requests:
            text, arguments = request.args
            generation = parse_generation(arguments, self._name(request))
            tokens = tuple(self.tok_encode(text))
            if not tokens:
                raise UsageError("has an empty prompt", where=self._name(request))
            key = repr((text, sorted(arguments.items(), key=str)))
            seed = self._seed + times[key] if generation.is_sampled else 0  # a repeated request is another draw
            times[key] += 1
            asked.append((request, Prompt(text, tokens, generation, seed, arguments)))
        return self._generate(asked)

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """lm-eval's inner method, for callers that have tokens; nothing here calls it."""
        pairs = [Pair(tuple(context), tuple(continuation)) for _, context, continuation in requests]
        found = dict(self.candidate.score(pairs))
        return [(found[index].logprob, found[index].is_greedy) for index in range(len(pairs))]

    def _pair(self, context: str, continuation: str) -> Pair:
        if context:
            return Pair(*map(tuple, self._encode_pair(context, continuation)))
        tokens = self.tok_encode(continuation, add_special_tokens=False)
        if tokens[:1] == [self.prefix_token_id]:
            return Pair(tuple(tokens[:1]), tuple(tokens[1:]))
        return Pair((self.prefix_token_id,), tuple(tokens))

    # -- answers

    def _score(self, asked: Sequence[tuple[Instance, Pair]]) -> list[Scored]:
        candidate = self.candidate
        kind = Kind(
            what="scoring",
            content=lambda pair: [pair.context, pair.continuation],
            context=lambda pair: pair.num_tokens,
            tokens=lambda pair: pair.num_tokens,
            refusal=candidate.refusal,
            compute=candidate.score,
            dump=lambda found: [found.logprob, found.is_greedy, found.num_decoded],
            load=_scored,
            stand_in=Scored(0.0, False),
        )
        answers = self.answers.to(kind, [(_place(request), pair) for request, pair in asked])
        for (request, pair), found in zip(asked, answers, strict=True):
            if _place(request) not in self.answers.skipped:
                tokens, decoded = self.scored_tokens.get(_task(request), (0, 0))
                counts = tokens + len(pair.continuation), decoded + found.num_decoded
                self.scored_tokens[_task(request)] = counts
        return answers

    def _generate(self, asked: Sequence[tuple[Instance, Prompt]]) -> list[str]:
        candidate = self.candidate
        kind: Kind[Prompt, str] = Kind(
            what="generating",
            content=lambda prompt: [prompt.text, prompt.tokens, asdict(prompt.generation), prompt.seed],
            context=lambda prompt: len(prompt.tokens),
            tokens=lambda prompt: len(prompt.tokens) + prompt.generation.max_tokens,
            refusal=candidate.refusal_of_prompt,
            compute=candidate.generate,
            dump=lambda text: text,
            load=str,
            stand_in="",
        )
        return self.answers.to(kind, [(_place(request), prompt) for request, prompt in asked])

    def _name(self, request: Instance) -> str:
        return self.answers.item_names(_place(request))


def _digest(windows: Sequence[Pair]) -> str:
    said = json.dumps([[pair.context, pair.continuation] for pair in windows])
    return hashlib.sha256(said.encode()).hexdigest()


def _scored(kept: Any) -> Scored:
    logprob, is_greedy, num_decoded = kept
    return Scored(float(logprob), bool(is_greedy), int(num_decoded))


def _task(request: Instance) -> str:
    return str(request.task_name)


def _place(request: Instance) -> Place:
    return _task(request), int(request.doc_id or 0)
