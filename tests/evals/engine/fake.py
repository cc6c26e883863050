"""A candidate without a model, for tests of what surrounds one: scores are digests, answers echo prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from quantkit.data import bundled_model
from quantkit_evals.candidates.candidate import OnProgress, TaskPath
from quantkit_evals.candidates.generation import Prompt
from quantkit_evals.candidates.pair import Pair, Scored
from quantkit_evals.tokenizer import load_tokenizer


class Fake:
    """See the module.

    Args:
        on_pair: called with how many pairs and prompts were computed before, for every one; may raise.
    """

    def __init__(
        self, label: str = "fake", *, max_length: int = 64, on_pair: Callable[[int], None] = lambda _: None
    ) -> None:
        self.label, self.max_length, self.num_computed = label, max_length, 0
        self.path: TaskPath = "decode"
        self.tokenizer = load_tokenizer(bundled_model("tiny-glm"))
        self._on_pair = on_pair

    def identity(self) -> dict[str, Any]:
        return {"label": self.label, "kind": "fake", "model": "none"}

    def state(self) -> str:
        return ""

    def refusal(self, pair: Pair) -> str | None:
        needed = pair.num_tokens - 1  # the last one is only asked about
        return f"{needed} tokens" if needed > self.max_length else None

    def refusal_of_prompt(self, prompt: Prompt) -> str | None:
        return None

    def score(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, Scored]]:
        for index in reversed(range(len(pairs))):
            self._on_pair(self.num_computed)
            self.num_computed += 1
            number = hashlib.sha256(repr(pairs[index]).encode()).digest()[0]
            yield index, Scored(-number / 7, number % 2 == 0, len(pairs[index].continuation) - 1)

    def generate(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, str]]:
        for index, prompt in enumerate(prompts):
            self._on_pair(self.num_computed)
            self.num_computed += 1
            yield index, f"{prompt.text} {prompt.seed}"

    def lm(self, *, cache: Path | None = None, on_progress: OnProgress = lambda _: None) -> Any:
        from quantkit_evals.harness.lm_eval_model import HarnessModel

        return HarnessModel(self, cache=cache, on_progress=on_progress)
