"""The sweep: warm up, then one level after the other, each with prompts of its own."""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from quantkit.data import bundled_text
from quantkit.errors import EnvironmentProblem, UsageError

from .client import Client, Prompt
from .drive import Level, drive
from .prompts import random_tokens, windows
from .record import Record
from .result import LevelResult, LoadResult

TEXT = "heldout"


@dataclass(frozen=True)
class LoadConfig:
    """What to measure.

    Attributes:
        levels: of the sweep.
        model: None: the one that the server has.
        prompts: windows of the bundled text, tokenized by the server, or random token ids.
        vocab_size: with random ids, which are below it.
        input_len, output_len: tokens.
        num_prompts: requests of a level.
        warmup: requests before each level that don't count, as many at a time as in the level.
        seed: of prompts and of arrival times.
        ignores_eos: answers go on to ``output_len`` (``ignore_eos``, which vLLM, SGLang and quantkit take).
        price_per_hour: of the machine, in any currency.
    """

    levels: tuple[Level, ...]
    model: str | None = None
    prompts: Literal["text", "random"] = "text"
    vocab_size: int | None = None
    input_len: int = 256
    output_len: int = 128
    num_prompts: int = 64
    warmup: int = 2
    seed: int = 0
    ignores_eos: bool = True
    price_per_hour: float | None = None

    @classmethod
    def of(
        cls,
        *,
        concurrency: Sequence[int] | None,
        rate: Sequence[float] | None,
        stops_at_eos: bool,
        **settings: Any,
    ) -> LoadConfig:
        """From the options of the command.

        Raises:
            UsageError: options that exclude or need each other.
        """
        if concurrency and rate:
            raise UsageError("--concurrency and --rate exclude each other", hint="Give one of them.")
        levels = [Level(rate=one) for one in rate] if rate else [Level(one) for one in concurrency or (1,)]
        return cls(levels=tuple(levels), ignores_eos=not stops_at_eos, **settings)

    def __post_init__(self) -> None:
        """
        Raises:
            UsageError: random prompts without a vocabulary, or the other way round.
        """
        if self.prompts == "random" and self.vocab_size is None:
            raise UsageError("random prompts need the size of the vocabulary", where="--vocab-size")
        if self.prompts == "text" and self.vocab_size is not None:
            raise UsageError("is for --prompts random", where="--vocab-size")
        for name, value in [
            ("--price-per-hour", self.price_per_hour),
            *(("--rate", level.rate) for level in self.levels),
        ]:
            if value is not None and not math.isfinite(value):
                raise UsageError(f"is {value}", where=name, accepted="a finite number")


def run(
    url: str,
    config: LoadConfig,
    *,
    plot: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> LoadResult:
    """``measure`` from start to end.

    Args:
        plot: where a plot will be written, to find out early that it can't be.

    Raises:
        UsageError: the plot's directory doesn't exist; see also ``measure``.
        EnvironmentProblem: see ``measure``.
    """
    if plot is not None and not Path(plot).absolute().parent.is_dir():
        raise UsageError(f"the directory of {str(plot)!r} doesn't exist", where="--plot")

    async def whole() -> LoadResult:
        async with Client(url) as client:
            return await measure(client, config, say=say)

    return asyncio.run(whole())


async def measure(
    client: Client, config: LoadConfig, *, say: Callable[[str], None] = lambda text: None
) -> LoadResult:
    """Run the sweep.

    Args:
        say: told what goes on, a line at a time.

    Raises:
        EnvironmentProblem: the server can't be reached, or can't answer the first request.
        UsageError: the server has several models; the bundled text is too short.
    """
    rng = random.Random(config.seed)
    model = config.model or await client.model()
    prompts = await _prompts(client, config, model, rng)
    send = partial(client.complete, model, max_tokens=config.output_len, ignores_eos=config.ignores_eos)
    first = await send(_take(prompts, 1)[0])
    if first.error is not None:
        raise EnvironmentProblem(f"the first request failed: {first.error}", where=client.url)
    results = []
    for number, level in enumerate(config.levels, 1):
        await drive(send, _take(prompts, config.warmup), Level(level.concurrency or config.warmup), rng)
        asked = _take(prompts, config.num_prompts)
        progress = _Progress(f"level {number} of {len(config.levels)}", len(asked), say)
        records, seconds = await drive(send, asked, level, rng, progress)
        results.append(
            LevelResult.of(
                level, records, seconds, output_len=config.output_len, price_per_hour=config.price_per_hour
            )
        )
    return LoadResult(
        url=client.url,
        model=model,
        prompts=config.prompts,
        input_len=config.input_len,
        output_len=config.output_len,
        num_prompts=config.num_prompts,
        seed=config.seed,
        ignores_eos=config.ignores_eos,
        price_per_hour=config.price_per_hour,
        levels=tuple(results),
    )


async def _prompts(client: Client, config: LoadConfig, model: str, rng: random.Random) -> Iterator[Prompt]:
    if config.vocab_size is not None:
        return random_tokens(config.vocab_size, config.input_len, rng)
    text = bundled_text(TEXT).read_text(encoding="utf-8")
    return windows(await client.tokenize(model, text), config.input_len, rng)


def _take(prompts: Iterator[Prompt], count: int) -> list[Prompt]:
    taken = list(islice(prompts, count))
    if len(taken) < count:
        raise UsageError(
            "the bundled text has too few different windows for so many requests", where="--num-prompts",
            hint="Use --prompts random.",
        )  # fmt: skip
    return taken


class _Progress:
    """Says how far a level is, about ten times."""

    def __init__(self, label: str, total: int, say: Callable[[str], None]) -> None:
        self._label, self._total, self._say = label, total, say
        self._done = self._failed = 0

    def __call__(self, record: Record) -> None:
        self._done += 1
        self._failed += record.error is not None
        if self._done % max(self._total // 10, 1) == 0 or self._done == self._total:
            failed = f", {self._failed} failed" if self._failed else ""
            self._say(f"{self._label}: {self._done} of {self._total} requests{failed}")
