"""From a directory and settings to an engine that answers: the one place that knows all parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.errors import EnvironmentProblem

from ..config import EngineConfig
from .servable import Servable

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..http.tokenizer import Tokenizer
    from ..split.config import SplitConfig


@dataclass(frozen=True)
class Assembled:
    """An engine and the tokenizer of its model.

    Attributes:
        pair_id: of the artifact; None for a plain checkpoint.
    """

    engine: Engine
    tokenizer: Tokenizer
    pair_id: str | None


def assemble(
    model: Servable, config: EngineConfig, *, split: SplitConfig | None = None, fault: str | None = None
) -> Assembled:
    """Load the model, take the memory of its pages.

    Args:
        model: an artifact, or a checkpoint in the Hugging Face layout.
        split: two workers, which end with the engine (``Engine.close``); None: one process.
        fault: to inject, one of ``paging.faults.FAULTS``; for tests.

    Raises:
        UsageError: settings that don't fit together, or not this model.
        ArtifactError, SourceError, UnsupportedError: the files.
        EnvironmentProblem: a package is missing, or memory for the pages.
    """
    from .extras import check_extras

    check_extras()
    from quantkit.artifact import Artifact
    from quantkit.artifact.layout import MANIFEST

    from ..engine.engine import Engine
    from ..engine.grammar import Compiler
    from ..engine.limits import num_pages
    from ..http.tokenizer import Tokenizer
    from ..model.runner import ModelRunner, open_runner
    from ..paging.faults import FAULTS
    from ..split.engine import SplitEngine
    from ..split.pair import Pair, open_pair

    folder, name = model
    is_artifact = (folder / MANIFEST).is_file()
    tokenizer = Tokenizer.load(folder / "decode" if is_artifact else folder)

    def more(runner: ModelRunner | Pair) -> dict[str, Any]:
        facts = runner.facts
        _check_memory(num_pages(facts, config) * facts.page_bytes)
        return {
            "compiler": Compiler(tokenizer.raw.to_str(), facts.vocab_size, facts.eos_token_ids),
            "fault": FAULTS[fault]() if fault else None,
            "scribble": runner.scribble,
        }

    engine: Engine
    if split is None:
        runner = open_runner(folder, config, name)
        engine = Engine(runner, config, tokenizer.vocabulary, **more(runner))
    else:
        pair = open_pair(folder, config, split, name)
        engine = SplitEngine(pair, config, split, tokenizer.vocabulary, **more(pair))
    return Assembled(engine, tokenizer, Artifact.open(folder).manifest.pair_id if is_artifact else None)


def _check_memory(nbytes: int) -> None:
    """The system promises more than it has, and ends a process that takes it at its word."""
    from quantkit.plan.memory import available_bytes
    from quantkit.units import format_bytes

    available = available_bytes()
    if available is not None and nbytes > available:
        raise EnvironmentProblem(
            f"KV pages of {format_bytes(nbytes)} don't fit: {format_bytes(available)} of memory are free",
            where="--kv-memory", hint="Give less.",
        )  # fmt: skip
