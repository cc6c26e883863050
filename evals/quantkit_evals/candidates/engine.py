"""Our engine as a candidate: one artifact or checkpoint in one configuration, in this process.

Scores come from ``Scorer``, answers from the server's engine. Both run on one loaded model and take turns with its
pages; an engine is made anew for every batch of prompts, so it never finds pages that scoring has overwritten.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import EnvironmentProblem, UsageError

from ..configuration import Configuration
from ..configuration import Path as ScoringPath
from ..extras import require
from ..tokenizer import load_tokenizer
from .candidate import OnProgress
from .digests import digests, files_state, is_artifact, view_folders
from .generation import Prompt
from .pair import AnswerFailed, Pair, PromptRefused, Scored

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM
    from torch import Tensor

    from quantkit_serve.batch import Batch, ModelFacts
    from quantkit_serve.config import EngineConfig
    from quantkit_serve.model.runner import ModelRunner
    from quantkit_serve.request import Request
    from quantkit_serve.start.servable import Servable

    from .scorer import Scorer, ScorerLimits

KV_BYTES = 1 << 30
PAGE_SIZE = 16  # small pages: what contexts share is found in whole pages
_WAITING = 256  # prompts that an engine holds at once


class EngineCandidate:
    """See ``Candidate``; the model is loaded when it is first needed.

    Args:
        model: an artifact or a checkpoint (``quantkit_serve.start.servable``).
        configuration: how it computes, and by which path it scores.
        label: for reports; by default the configuration's weights and KV dtype.
        kv_bytes: at most so much memory for pages.
        decoded_context: with the path ``decode``, so many last tokens of contexts go through decode steps as well.
            0 scores as a server does, whose first token comes from prefill; 1 lets every scored token come from a
            decode step.
    """

    def __init__(
        self,
        model: Servable,
        configuration: Configuration,
        *,
        label: str | None = None,
        kv_bytes: int = KV_BYTES,
        decoded_context: int = 0,
        limits: ScorerLimits | None = None,
    ) -> None:
        if decoded_context < 0:
            raise UsageError(f"is {decoded_context}", where="decoded_context", accepted="0 or more")
        self.model, self.configuration = model, configuration
        self.label = label or f"{configuration.weights}, {configuration.kv_dtype} KV"
        self.decoded_context = decoded_context if configuration.path == "decode" else 0
        self._kv_bytes, self._limits = kv_bytes, limits

    # -- what it is

    @property
    def path(self) -> ScoringPath:
        return self.configuration.path

    @cached_property
    def tokenizer_folder(self) -> Path:
        return self.model.folder / "decode" if is_artifact(self.model.folder) else self.model.folder

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.tokenizer_folder)

    def identity(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "label": self.label, "kind": "engine", "model": self.model.name,
            "configuration": self.configuration.to_json(), "decoded_context": self.decoded_context,
        }  # fmt: skip
        return found | self._digests | {"engine": _engine_versions()}

    @cached_property
    def _digests(self) -> dict[str, Any]:
        return digests(self.model.folder)

    # -- the loaded model

    @cached_property
    def engine_config(self) -> EngineConfig:
        """As ``quantkit serve`` has it, with one path and one thread in mind."""
        from quantkit_serve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig

        made = self.configuration
        return EngineConfig(
            ModelConfig(weights=made.weights, compute=made.compute, fp8_activations=made.fp8_activations),
            CacheConfig(kv_dtype=made.kv_dtype, page_size=PAGE_SIZE, kv_bytes=self._kv_bytes),
            SchedulerConfig(max_num_batched_tokens=self.limits.max_tokens, max_waiting=_WAITING),
        )

    @property
    def limits(self) -> ScorerLimits:
        from .scorer import ScorerLimits

        return self._limits or ScorerLimits()

    @cached_property
    def runner(self) -> ModelRunner:
        """The model, its pages allocated.

        Raises:
            ArtifactError, SourceError, UnsupportedError: the files.
            UsageError: the configuration is not for this model.
            EnvironmentProblem: no memory for the pages.
        """
        require("torch")
        from quantkit_serve.model.runner import open_runner

        found = open_runner(self.model.folder, self.engine_config, self.model.name)
        page_bytes = found.facts.page_bytes
        longest = -(-found.facts.max_model_len // PAGE_SIZE)
        count = min(self.limits.max_sequences * longest, self._kv_bytes // page_bytes)
        if count < 1:
            raise UsageError(
                f"is {self._kv_bytes}, less than one page", where="kv_bytes", accepted=f"{page_bytes}"
            )
        _check_memory(count * page_bytes)
        found.allocate(count)
        self._num_pages = count
        return found

    @property
    def num_pages(self) -> int:
        return self._num_pages if self.runner else 0

    def scorer(self, num_pages: int | None = None, limits: ScorerLimits | None = None) -> Scorer:
        """Of all its pages, or of fewer; with its own limits, or others."""
        from .scorer import Scorer

        count = num_pages or self.num_pages
        return Scorer(self.runner, num_pages=count, page_size=PAGE_SIZE, limits=limits or self.limits)

    @property
    def max_length(self) -> int:
        return self.runner.facts.max_model_len

    # -- what it does

    def state(self) -> str:
        return files_state(*view_folders(self.model.folder))

    def refusal(self, pair: Pair) -> str | None:
        return self._scorer.refusal(pair)

    @cached_property
    def _scorer(self) -> Scorer:
        return self.scorer()

    def score(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, Scored]]:
        return self._scorer.score(pairs, self.path, decoded_context=self.decoded_context)

    def refusal_of_prompt(self, prompt: Prompt) -> str | None:
        needed, room = len(prompt.tokens) + prompt.generation.max_tokens, self._scorer.max_tokens
        if needed > room:
            answer = prompt.generation.max_tokens
            return f"{len(prompt.tokens)} tokens and an answer of {answer}, there is room for {room}"
        return None

    def generate(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, str]]:
        from quantkit_serve.engine.engine import Engine
        from quantkit_serve.engine.grammar import Compiler
        from quantkit_serve.http.tokenizer import Tokenizer
        from quantkit_serve.refusal import Refused
        from quantkit_serve.request import FinishReason

        tokenizer = Tokenizer.load(self.tokenizer_folder)
        facts = self.runner.facts
        shared = _Shared(self.runner, self.num_pages)
        compiler = Compiler(tokenizer.raw.to_str(), facts.vocab_size, facts.eos_token_ids)
        engine = Engine(shared, self._generating_config(), tokenizer.vocabulary, compiler=compiler)
        waiting = iter(enumerate(prompts))
        texts: dict[str, list[str]] = {}
        while True:
            for index, prompt in itertools.islice(waiting, _WAITING - len(texts)):
                texts[str(index)] = []
                try:
                    engine.add(_request(str(index), prompt))
                except Refused as refused:
                    raise PromptRefused(index, str(refused)) from None
            if not engine.has_work:
                return
            for output in engine.step():
                texts[output.request_id].append(output.text)
                if output.finish is FinishReason.ERROR:
                    failed = PromptRefused if output.error_status < 500 else AnswerFailed
                    raise failed(int(output.request_id), output.error or "an answer failed")
                if output.finish is not None:
                    yield int(output.request_id), "".join(texts.pop(output.request_id))

    def _generating_config(self) -> EngineConfig:
        from dataclasses import replace

        config = self.engine_config
        nbytes = self.num_pages * self.runner.facts.page_bytes
        return replace(config, cache=replace(config.cache, kv_bytes=nbytes))

    def lm(self, *, cache: Path | None = None, on_progress: OnProgress = lambda _: None) -> TemplateLM:
        from ..harness.lm_eval_model import HarnessModel

        return HarnessModel(self, cache=cache, on_progress=on_progress)


class _Shared:
    """A runner whose pages are allocated already, for one engine after the other."""

    def __init__(self, runner: ModelRunner, num_pages: int) -> None:
        self._runner, self._num_pages = runner, num_pages
        self.facts: ModelFacts = runner.facts

    def allocate(self, num_pages: int) -> None:
        if num_pages > self._num_pages:
            raise ValueError(f"{num_pages} pages wanted, {self._num_pages} are there")

    def run(self, batch: Batch) -> Tensor:
        return self._runner.run(batch)


def _request(name: str, prompt: Prompt) -> Request:
    from quantkit_serve.request import Grammar, Request, SamplingParams

    made = prompt.generation
    grammar = Grammar("json_schema", made.json_schema) if made.json_schema else None
    return Request(
        name,
        prompt.tokens,
        SamplingParams(
            max_tokens=made.max_tokens, temperature=made.temperature, top_p=made.top_p, top_k=made.top_k,
            min_p=made.min_p, repetition_penalty=made.repetition_penalty, stop=made.stop, grammar=grammar,
            seed=prompt.seed,
        ),
    )  # fmt: skip


def _engine_versions() -> dict[str, str]:
    """Of what computes: results of another build or backend are not taken from a cache.

    Raises:
        UsageError: a variable asks for a backend or instructions that are not there.
    """
    import torch

    import quantkit
    from quantkit_kernels.library import Library
    from quantkit_kernels.registry import backend

    try:
        found = backend()
        kernels = found.name
        if found.name == "cpu":
            path = Path(Library.load().handle._name)
            kernels = f"cpu, {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}, {found.isa}"
    except ValueError as error:
        raise UsageError(str(error), where="environment") from None
    return {"quantkit": quantkit.__version__, "kernels": kernels, "torch": str(torch.__version__)}


def _check_memory(nbytes: int) -> None:
    """The system promises more than it has, and ends a process that takes it at its word."""
    from quantkit.plan.memory import available_bytes
    from quantkit.units import format_bytes

    available = available_bytes()
    if available is not None and nbytes > available:
        raise EnvironmentProblem(
            f"KV pages of {format_bytes(nbytes)} don't fit: {format_bytes(available)} of memory are free",
            hint="Give less (kv_bytes).",
        )
