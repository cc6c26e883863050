"""Speculative decoding: tokens proposed by a multi-token-prediction layer, computed behind the known one.

A decode step computes a sequence's last token and its drafts in one run (``scheduler``); the tokens chosen behind
them say how many drafts were right (``choosing``). Then, still in the step, the layer is run over what is known
now and proposes the next drafts: here. So the answer is that of single steps as long as a token's bits don't
depend on how many its run has, which the models keep.

What the layer leaves in the pages of a token depends on the token that follows it. So it runs over all tokens of a
step that have a follower, prompts included, and those of other requests where pages of prompts are shared. A page
then stands for its own tokens and the one behind it, which the prefix index compares as well (``lookahead``).

Requests that sample, have a grammar, whose state can't be turned back, or penalties, which change with every
token, are left out. Stop strings, end tokens, ``min_tokens``, ``logit_bias`` and logprobs are as without.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from quantkit.errors import UsageError

from ..batch import Batch, Proposer, Runner
from ..config import ModelConfig
from ..phase import Phase
from ..request import SamplingParams
from .answering import end_tokens
from .choosing import Chosen
from .scheduler import Run

LOOKAHEAD = 1  # tokens behind a page that what it holds depends on


class Speculation:
    """Proposes and counts.

    Args:
        runner: of the model.
        num_tokens: to propose at a time.
        page_size: tokens in a page.
        shares_prompts: pages of prompts may be used by other requests.
        eos: the model's end tokens.

    Attributes:
        num_drafts: times that drafts were verified.
        num_draft_tokens, num_accepted_tokens: how many they were, and how many of them right.
        num_left_out: requests that don't take part.

    Raises:
        UsageError: the runner proposes nothing.
    """

    def __init__(
        self, runner: Runner, num_tokens: int, *, page_size: int, shares_prompts: bool, eos: frozenset[int]
    ) -> None:
        if not isinstance(runner, Proposer):
            raise UsageError("this way to run a model proposes no tokens", where="--speculative", accepted="off")
        self._runner, self.num_tokens, self._page_size = runner, num_tokens, page_size
        self._shares_prompts, self._eos = shares_prompts, eos
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = self.num_left_out = 0

    def takes(self, params: SamplingParams) -> bool:
        """Whether tokens are proposed for such a request; counts those for which none are."""
        does = params.temperature == 0 and params.grammar is None and not params.has_penalties
        self.num_left_out += not does
        return does

    def verified(self, run: Run, num_accepted: int) -> None:
        """A run's drafts were computed."""
        if run.drafts:
            self.num_drafts += 1
            self.num_draft_tokens += len(run.drafts)
            self.num_accepted_tokens += num_accepted

    def propose(self, batch: Batch, chosen: Iterable[Chosen]) -> None:
        """Run the layer over the tokens of the latest step, and give each of ``chosen`` its drafts."""
        counts, drafting = [], []
        table_rows: list[int] = []
        rows: list[int] = []
        followers: list[int] = []
        cu_tokens, ends = [0], []
        for one in chosen:
            first = one.rows.first
            start = int(batch.positions[first])  # the sequence has none any more if it was aborted meanwhile
            own = [] if one.error is not None else self._followers(one, start)
            if not own:
                continue
            table_rows.append(int(np.searchsorted(batch.cu_tokens, first, side="right")) - 1)
            rows += range(first, first + len(own))
            followers += own
            cu_tokens.append(len(rows))
            if (count := self._count(one, start + len(own))) > 0:
                counts.append(count)
                drafting.append(one)
                ends.append(len(rows) - 1)
        if not rows:
            return
        positions = batch.positions[rows]
        known = Batch(
            phase=Phase.DECODE,
            token_ids=np.array(followers, np.int64),
            positions=positions,
            cu_tokens=np.array(cu_tokens, np.int32),
            lengths=(positions[np.array(cu_tokens[1:]) - 1] + 1).astype(np.int32),
            block_table=batch.block_table[table_rows],
            logit_rows=np.array(ends, np.int64),
        )
        found = self._runner.propose(known, np.array(rows, np.int64), np.array(counts, np.int64))
        for one, tokens in zip(drafting, found, strict=True):
            one.drafts = tokens

    def _followers(self, one: Chosen, start: int) -> list[int]:
        """The token after each of the run's, as far as there is one and somebody will read the layer's entries."""
        run = one.rows.run
        sequence = run.sequence
        count = run.count + max(len(one.tokens) - 1, 0)
        if not sequence.is_speculative:
            count = min(count, sequence.num_prompt - LOOKAHEAD - start) if self._shares_prompts else 0
        if count <= 0:
            return []
        own = sequence.tokens[start + 1 : start + 1 + count]
        return own + one.tokens[: count - len(own)]

    def _count(self, one: Chosen, position: int) -> int:
        """How many tokens to propose behind the one at ``position``, the last: those that may be computed before
        the answer is as long as it may be, and for which the sequence has pages."""
        sequence = one.rows.run.sequence
        if not (sequence.is_speculative and one.tokens) or one.tokens[-1] in end_tokens(sequence, self._eos):
            return 0
        room = len(sequence.table) * self._page_size - position + 1  # the first one writes before ``position``
        return min(self.num_tokens, sequence.max_stored - position - 1, room)


def speculation(runner: Runner, model: ModelConfig, *, page_size: int, shares_prompts: bool) -> Speculation | None:
    """As configured; None: off.

    Raises:
        UsageError: see ``Speculation``.
    """
    if model.speculative == "off":
        return None
    return Speculation(
        runner, model.num_speculative_tokens, page_size=page_size, shares_prompts=shares_prompts,
        eos=runner.facts.eos_token_ids,
    )  # fmt: skip
