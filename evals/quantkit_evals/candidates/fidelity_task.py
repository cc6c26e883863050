"""Fidelity as a task: the baseline and all candidates run the same text in lockstep, decode-forced or by prefill.

KL divergence, top-1 agreement and flips compare whole distributions, so they see what a change of weights does
long before accuracies do. The items are blocks of held-out text, the unit of every standard error. Two curves
say where the divergence is: by position in a block (whose earlier tokens went the same path), and by length of
context, from further, shorter samples whose context is prefilled, as a prompt is.

Every model is in memory at once; logits are those of one step. The baseline takes the path of the candidates, so a
divergence is that of weights and pages, not of two ways to compute the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from quantkit.errors import ArtifactError, UsageError

from ..configuration import Path as ScoringPath
from ..run import CurvePoint, Item, Metric, Run, Task
from ..statistics import Mean
from ..text import BLOCK_TOKENS, text_path, token_blocks
from ..tokenizer import FAST, check_fast_tokenizer
from .candidate import OnProgress, Progress
from .divergence import FIGURES, Divergence, Floats
from .engine import EngineCandidate
from .pair import NotFinite, Pair, PromptRefused
from .scorer import Step

TASK = "fidelity"
NUM_BLOCKS = 64
CONTEXTS = (64, 256, 512, 1024)
BY_POSITION, BY_CONTEXT = "kl by position", "kl by context length"
PERPLEXITY = Metric("perplexity", "perplexity", False, "")
METRICS = (
    Metric("kl", "mean", False, "nats/token", is_of_pair=True),
    Metric("top1_agreement", "share", True, "%", is_of_pair=True),
    Metric("lost", "share", False, "%", is_of_pair=True),
    Metric("gained", "share", True, "%", is_of_pair=True),
    PERPLEXITY,
)
_BINS = 16
_SAMPLES = 8  # for each length of context
_ASKED = 32  # tokens behind each context


@dataclass(frozen=True)
class FidelityText:
    """What is run.

    Attributes:
        text: ``heldout``, ``calib`` or the path of a UTF-8 file.
        num_blocks: spread over the text, at least 2.
        block_tokens: of each.
        context_tokens: of each that are prefilled and not scored.
        contexts: lengths of context for the second curve; those that a model or the text has no room for are left
            out.
    """

    text: str = "heldout"
    num_blocks: int = NUM_BLOCKS
    block_tokens: int = BLOCK_TOKENS
    context_tokens: int = 1
    contexts: tuple[int, ...] = CONTEXTS

    def __post_init__(self) -> None:
        if self.num_blocks < 2:
            raise UsageError(
                f"{self.num_blocks} blocks have no standard error", where="num_blocks", accepted="2 or more"
            )
        if not 1 <= self.context_tokens < self.block_tokens:
            raise UsageError(
                f"{self.context_tokens} tokens of context in a block of {self.block_tokens}",
                where="context_tokens",
            )


@dataclass(frozen=True)
class Records:
    """The task as one candidate's run has it.

    Attributes:
        scored_tokens: tokens scored, and those of them whose distribution a decode step gave.
    """

    task: Task
    items: tuple[Item, ...]
    scored_tokens: tuple[int, int]

    def added_to(self, run: Run, baseline: Run | None = None) -> Run:
        """The run with this task; ``baseline``: whose figures these were made against."""
        tokens, decoded = self.scored_tokens
        scored = {**run.candidate.get("scored_tokens", {}), TASK: {"tokens": tokens, "decoded": decoded}}
        stated = {} if baseline is None else {"baseline": dict(baseline.candidate)}
        return replace(
            run,
            candidate={**run.candidate, "scored_tokens": scored},
            settings={**run.settings, **stated},
            tasks=(*run.tasks, self.task),
            items=(*run.items, *self.items),
        )


def fidelity_task(
    baseline: EngineCandidate,
    candidates: Sequence[EngineCandidate],
    *,
    text: FidelityText = FidelityText(),
    path: ScoringPath | None = None,
    on_progress: OnProgress = lambda _: None,
) -> list[Records]:
    """Records of the baseline, which has its perplexity alone, then of each candidate.

    Args:
        path: of all; by default decode if a candidate's is, so that what is under test shows.

    Raises:
        UsageError: no candidates, another tokenizer or vocabulary, or no such text.
        ArtifactError: logits that are not numbers.
    """
    everyone = [baseline, *candidates]
    if not candidates:
        raise UsageError("there is nobody to compare with the baseline", where=TASK)
    _check_tokenizers(everyone)
    if path is None:
        path = "decode" if any(c.path == "decode" for c in candidates) else "prefill"
    blocks = token_blocks(
        baseline.tokenizer_folder, text.text, num_blocks=text.num_blocks, block_tokens=text.block_tokens
    )
    pairs = [_pair(block.tolist(), text.context_tokens) for block in blocks]
    samples = _samples(baseline, text, min(one.scorer().max_tokens for one in everyone))
    more = [pair for group in samples.values() for pair in group]
    lockstep = _Lockstep(everyone, [*pairs, *more], len(pairs), path)
    own, others = lockstep.run(on_progress)
    version = _version(text)
    scored = sum(len(pair.continuation) for pair in pairs)
    counts = scored, scored - len(pairs) if path == "decode" else 0  # the first token of each comes from prefill
    first = Task(TASK, version, path, (PERPLEXITY,))
    found = [Records(first, tuple(_items(pairs, own, ("nll",), text)), counts)]
    for values in others:
        curves = _curves(pairs, samples, values, text)
        task = Task(TASK, version, path, METRICS, curves=curves)
        found.append(Records(task, tuple(_items(pairs, values, FIGURES, text)), counts))
    return found


class _Lockstep:
    """All models through the same steps."""

    def __init__(
        self, everyone: Sequence[EngineCandidate], pairs: Sequence[Pair], num_blocks: int, path: ScoringPath
    ) -> None:
        num_pages = min(one.num_pages for one in everyone)
        scorers = [one.scorer(num_pages, everyone[0].limits) for one in everyone]
        for one, scorer in zip(everyone, scorers, strict=True):
            for pair in pairs:
                if (why := scorer.refusal(pair)) is not None:
                    raise UsageError(f"a block does not fit: {why}", where=f"{one.label}, task {TASK}")
        vocabularies = {one.runner.facts.vocab_size for one in everyone}
        if len(vocabularies) > 1:
            raise UsageError(f"vocabularies of {sorted(vocabularies)} tokens", where=TASK, accepted="one of all")
        self._everyone, self._pairs, self._num_blocks = everyone, pairs, num_blocks
        try:
            self._steps = [scorer.steps(pairs, path) for scorer in scorers]
        except PromptRefused as refused:
            raise UsageError(f"a block {refused}", where=TASK) from None

    def run(self, on_progress: OnProgress) -> tuple[Divergence, list[Divergence]]:
        """Of the baseline from itself, and of each candidate from it."""
        own, others = Divergence(self._pairs), [Divergence(self._pairs) for _ in self._everyone[1:]]
        for first, *rest in self._watched(on_progress):
            for candidate, divergence, step in zip(self._everyone, [own, *others], [first, *rest], strict=True):
                try:
                    divergence.add(first, step)
                except NotFinite as error:
                    raise ArtifactError(
                        str(error), where=f"{candidate.label}, task {TASK}, {self._name(error.pair)}"
                    ) from None
        return own, others

    def _name(self, index: int) -> str:
        return f"item {_block(index)}" if index < self._num_blocks else "a sample of the curve by context"

    def _watched(self, on_progress: OnProgress) -> Iterator[tuple[Step, ...]]:
        total = sum(len(pair.continuation) for pair in self._pairs)
        start, done = monotonic(), 0
        for steps in zip(*self._steps, strict=True):
            yield steps
            done += len(steps[0].rows)
            on_progress(Progress(TASK, "scoring", done, total, 0, done / total, monotonic() - start))


def _pair(tokens: list[int], context: int) -> Pair:
    return Pair(tuple(tokens[:context]), tuple(tokens[context:]))


def _samples(baseline: EngineCandidate, text: FidelityText, room: int) -> dict[int, list[Pair]]:
    """For each length of context that there is room for."""
    found = {}
    for context in text.contexts:
        size = context + _ASKED
        if size > room:
            continue
        try:
            blocks = token_blocks(baseline.tokenizer_folder, text.text, num_blocks=_SAMPLES, block_tokens=size)
        except UsageError:  # the text is too short for this one
            continue
        found[context] = [_pair(block.tolist(), context) for block in blocks]
    return found


def _block(index: int) -> str:
    return f"block {index}"


def _items(
    pairs: Sequence[Pair], divergence: Divergence, figures: Sequence[str], text: FidelityText
) -> Iterator[Item]:
    for index, pair in enumerate(pairs):
        values, weights = {}, {}
        for figure in figures:
            name = "perplexity" if figure == "nll" else figure
            values[name] = float(divergence.values[figure][index].sum())
            weights[name] = float(len(pair.continuation))
        name = _block(index)
        digest = hashlib.sha256(json.dumps([pair.context, pair.continuation]).encode()).hexdigest()
        yield Item(TASK, name, name, digest, values, weights, pair.num_tokens)


def _curves(
    pairs: Sequence[Pair], samples: dict[int, list[Pair]], divergence: Divergence, text: FidelityText
) -> dict[str, tuple[CurvePoint, ...]]:
    kl, first = divergence.values["kl"], text.context_tokens
    count = len(pairs[0].continuation)
    width = -(-count // _BINS)
    by_position = [
        _point(
            first + start,
            first + min(start + width, count),
            [row[start : start + width] for row in kl[: len(pairs)]],
        )
        for start in range(0, count, width)
    ]
    by_context, at = [], len(pairs)
    for context, group in samples.items():
        by_context.append(_point(context, context + _ASKED, kl[at : at + len(group)]))
        at += len(group)
    curves = {BY_POSITION: tuple(by_position), BY_CONTEXT: tuple(by_context)}
    return {name: points for name, points in curves.items() if points}


def _point(start: int, stop: int, rows: Sequence[Floats]) -> CurvePoint:
    mean = Mean.of([float(row.mean()) for row in rows])
    return CurvePoint(start, stop, mean.value, mean.stderr)


def _version(text: FidelityText) -> str:
    digest = hashlib.sha256(text_path(text.text).read_bytes())
    sizes: list[Any] = [text.num_blocks, text.block_tokens, text.context_tokens]
    digest.update(json.dumps(sizes).encode())
    return digest.hexdigest()


def _check_tokenizers(everyone: Sequence[EngineCandidate]) -> None:
    for one in everyone:
        check_fast_tokenizer(one.tokenizer_folder)
    digests = {_digest(one.tokenizer_folder / FAST) for one in everyone}
    if len(digests) > 1:
        raise UsageError("the models have different tokenizers", where=TASK, accepted="the same one for all")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
