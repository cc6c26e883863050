"""What every candidate can do. The harness (``harness``) knows no more of it than this."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from .generation import Prompt
from .pair import Pair, Scored

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM

TaskPath = Literal["prefill", "decode", "unknown"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a candidate is.

    Attributes:
        label: the candidate's.
        what: ``scoring`` or ``generating``.
        done, total: requests.
        num_cached: of them, answered from the cache.
        share: of the work, between 0 and 1; long requests count more than short ones.
        elapsed_s: since the first one.
    """

    label: str
    what: str
    done: int
    total: int
    num_cached: int
    share: float
    elapsed_s: float

    @property
    def eta_s(self) -> float | None:
        """Seconds left, if the rest goes as what was done; None before anything was."""
        return None if self.share <= 0 else self.elapsed_s * (1 - self.share) / self.share


OnProgress = Callable[[Progress], None]


class Candidate(Protocol):
    """A model that is evaluated.

    Attributes:
        label: for reports, unique among those that are compared.
        path: by which it scores continuations; ``unknown`` where somebody else's server does.
        max_length: tokens of context and continuation without its last, which is only asked about.
    """

    @property
    def label(self) -> str: ...

    @property
    def path(self) -> TaskPath: ...

    @property
    def max_length(self) -> int: ...

    @property
    def tokenizer(self) -> Any:
        """Of transformers."""

    def identity(self) -> dict[str, Any]:
        """``Run.candidate``, JSON-ready: all that decides what the candidate answers, digests among it."""

    def state(self) -> str:
        """Of the files that answers come from: others than when an answer was kept, and it is made again. What an
        artifact states of itself stays as it is when its files are damaged. Empty: there are no files here."""

    def refusal(self, pair: Pair) -> str | None:
        """Why a pair can't be scored, mostly its length; None if it can."""

    def refusal_of_prompt(self, prompt: Prompt) -> str | None:
        """Why a prompt can't be answered; None if it can."""

    def score(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, Scored]]:
        """(index, score) of each pair, as they are done.

        Raises:
            NotFinite: the model's logits are not numbers.
            PromptRefused: a pair has a token that the model doesn't know.
            EnvironmentProblem: an endpoint failed.
        """

    def generate(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, str]]:
        """(index, answer) of each prompt, as they are done.

        Raises:
            EnvironmentProblem: as ``score``.
            AnswerFailed: the model's logits are not numbers.
            PromptRefused: a prompt that is refused, at once or where its schema can't be followed any further.
        """

    def lm(self, *, cache: Path | None = None, on_progress: OnProgress = lambda _: None) -> TemplateLM:
        """As lm-eval sees it."""
