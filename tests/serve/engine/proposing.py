"""A runner that proposes tokens as well or as badly as it is told.

Its layer leaves in each token's place a hash of what the token left there and of the token that follows it, and
compares all of a context with what should be there before it proposes behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit_serve.batch import Batch
from quantkit_serve.config import EngineConfig
from quantkit_serve.engine.engine import Engine
from quantkit_serve.phase import Phase
from tests.serve.engine.fake import FakeRunner, engine
from tests.serve.engine.hashes import MASK, VOCAB, fold, logits_of, mix, stored

Choose = Callable[[NDArray[np.float32], int], int]


def right(logits: NDArray[np.float32], position: int) -> int:
    return int(logits.argmax())


def wrong(logits: NDArray[np.float32], position: int) -> int:
    return int(logits.argmin())


def mixed(logits: NDArray[np.float32], position: int) -> int:
    return right(logits, position) if mix(position) % 3 else wrong(logits, position)


class ProposingRunner(FakeRunner):
    """Proposes what ``choose`` makes of the true logits.

    Attributes:
        core: set once there is one; whose sequences have the pages.
        proposals: how many tokens it was asked for, each time.
        between: called before it proposes.
        aborted: requests that have no pages although their step is under way.
    """

    core: Engine

    def __init__(self, choose: Choose, **more: int) -> None:
        super().__init__(**more)  # type: ignore[arg-type]
        self._choose = choose
        self.proposals: list[int] = []
        self.between: Callable[[], object] = lambda: None
        self.aborted: set[str] = set()

    def allocate(self, num_pages: int) -> None:
        super().allocate(num_pages)
        self.tokens = np.full((num_pages, self.page_size), -1)
        self.entries = np.zeros((num_pages, self.page_size), np.uint64)

    def run(self, batch: Batch) -> torch.Tensor:
        for row in range(len(batch.lengths)):
            for at in range(batch.cu_tokens[row], batch.cu_tokens[row + 1]):
                self.tokens[self._place(batch, row, int(batch.positions[at]))] = batch.token_ids[at]
        return super().run(batch)

    def propose(self, batch: Batch, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> list[list[int]]:
        self.between()
        latest = self.batches[-1]
        assert batch.phase is Phase.DECODE
        assert (batch.positions == latest.positions[rows]).all()
        for row in range(len(batch.lengths)):
            for at in range(batch.cu_tokens[row], batch.cu_tokens[row + 1]):
                place = self._place(batch, row, int(batch.positions[at]))
                self.entries[place] = mix(int(self.pages[place]), int(batch.token_ids[at]))
        found = []
        for end, count in zip(batch.logit_rows.tolist(), counts.tolist(), strict=True):
            row = int(np.searchsorted(batch.cu_tokens, end, side="right")) - 1
            assert end == batch.cu_tokens[row + 1] - 1
            found.append(self._continue(batch, row, int(batch.positions[end]), int(batch.token_ids[end]), count))
            self.proposals.append(count)
        return found

    def _place(self, batch: Batch, row: int, position: int) -> tuple[int, int]:
        return int(batch.block_table[row, position // self.page_size]), position % self.page_size

    def _continue(self, batch: Batch, row: int, position: int, follower: int, count: int) -> list[int]:
        places = [self._place(batch, row, p) for p in range(position + 1)]
        followers = [*(int(self.tokens[place]) for place in places[1:]), follower]
        for place, after in zip(places, followers, strict=True):
            assert self.entries[place] == mix(int(self.pages[place]), after), "an entry of another token"
        sums, tokens, token = fold([int(self.pages[place]) for place in places]), [], follower
        for further in range(count):
            if further:  # the layer writes there
                self._check_owned(batch.block_table[row].tolist(), position + further)
                self.entries[self._place(batch, row, position + further)] = 0xBAD
            at = position + 1 + further
            sums = (sums + mix(stored(token, at, Phase.DECODE, sums), at)) & MASK
            token = self._choose(logits_of(sums, VOCAB), at)
            tokens.append(token)
        return tokens

    def _check_owned(self, table: list[int], position: int) -> None:
        pages = table[: position // self.page_size + 1]
        owners = [s for s in self.core.scheduler.running if s.table[: len(pages)] == pages]
        assert len(owners) == 1 or "r1" in self.aborted


def speculative(settings: EngineConfig, num_tokens: int = 1) -> EngineConfig:
    model = replace(settings.model, speculative="mtp", num_speculative_tokens=num_tokens)
    return replace(settings, model=model)


def proposing(choose: Choose, settings: EngineConfig, num_tokens: int = 1) -> tuple[Engine, ProposingRunner]:
    runner = ProposingRunner(choose, page_size=settings.cache.page_size)
    core, _ = engine(speculative(settings, num_tokens), runner)
    runner.core = core
    return core, runner
