"""A request inside the engine: its tokens, how far their keys and values are in pages, and which pages these are.

``table`` is what attention reads and writes through; ``expected`` is what the sequence was given. They are kept
apart so that comparing them, and the tags, finds a table that was changed under the sequence.

A token's phase is a property of its place: prompt tokens are computed by prefill, generated ones by decode, also
when they are computed again after a preemption.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from ..paging import Entries, PageRef
from ..phase import Phase
from ..request import Request, TokenLogprob

if TYPE_CHECKING:
    from .detokenizer import Detokenizer
    from .grammar import Matcher


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """State of one request.

    Attributes:
        arrival: its place in the order of arrival; the scheduler is fair by it.
        deadline: on the engine's clock; None: never.
        seed: of its draws; the request's, or a fresh one.
        num_prompt: tokens of the prompt.
        tokens: prompt, then generated ones.
        num_computed: first tokens whose keys and values are in pages.
        num_cached: tokens that its first admission found in the prefix index.
        table: page ids, for attention.
        expected: the same pages with the tags that they had when the sequence was given them.
        num_indexed: first pages that are in the prefix index already.
        counts: how often each generated token occurs.
        prompt_logprobs: of the first tokens of the prompt, as far as computed; empty if not asked for.
        is_prompt_reported: the caller has the prompt's logprobs.
        num_preemptions: times that it gave back its pages.
        is_speculative: tokens are proposed for it.
        drafts: proposed tokens, for the next decode step.
    """

    request: Request
    arrival: int
    seed: int
    detokenizer: Detokenizer
    deadline: float | None = None
    matcher: Matcher | None = None
    state: State = State.WAITING
    num_prompt: int = 0
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    table: Entries[int] = field(default_factory=Entries)
    expected: Entries[PageRef] = field(default_factory=Entries)
    num_indexed: int = 0
    counts: Counter[int] = field(default_factory=Counter)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    is_prompt_reported: bool = False
    num_preemptions: int = 0
    is_speculative: bool = False
    drafts: SequenceOf[int] = ()

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.num_prompt = len(self.tokens)
        if self.request.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # nothing comes before the first

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def max_stored(self) -> int:
        """Tokens that it may ever keep in pages; the last generated one is never computed."""
        return self.num_prompt + max(self.request.params.max_tokens - 1, 0)

    @property
    def phase(self) -> Phase:
        """Of its next token."""
        return Phase.PREFILL if self.num_computed < self.num_prompt else Phase.DECODE

    @property
    def num_pending(self) -> int:
        """Tokens of its phase that are known and not yet computed."""
        end = self.num_prompt if self.phase is Phase.PREFILL else len(self.tokens)
        return end - self.num_computed

    @property
    def has_prompt_logprobs_due(self) -> bool:
        return 0 < len(self.prompt_logprobs) < self.num_prompt

    def give(self, refs: list[PageRef]) -> None:
        """Append pages."""
        self.expected.extend(refs)
        self.table.extend(ref.page for ref in refs)

    def take_back(self) -> list[PageRef]:
        """All its pages; it has none, and nothing computed, afterwards."""
        refs = list(self.expected)
        self.expected.clear()
        self.table.clear()
        self.num_computed = self.num_indexed = 0
        self.drafts = ()
        return refs

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.counts[token] += 1
