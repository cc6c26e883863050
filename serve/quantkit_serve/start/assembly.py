"""From a directory and settings to an engine that answers: the one place that knows all parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config import EngineConfig
from .servable import Servable

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..http.tokenizer import Tokenizer


@dataclass(frozen=True)
class Assembled:
    """An engine and the tokenizer of its model.

    Attributes:
        pair_id: of the artifact; None for a plain checkpoint.
    """

    engine: Engine
    tokenizer: Tokenizer
    pair_id: str | None


def assemble(model: Servable, config: EngineConfig, *, fault: str | None = None) -> Assembled:
    """Load the model, take the memory of its pages.

    Args:
        model: an artifact, or a checkpoint in the Hugging Face layout.
        fault: to inject, one of ``paging.faults.FAULTS``; for tests.

    Raises:
        UsageError: settings that don't fit together, or not this model.
        ArtifactError, SourceError, UnsupportedError: the files.
        EnvironmentProblem: a package is missing.
    """
    from .extras import check_extras

    check_extras()
    from quantkit.artifact import Artifact
    from quantkit.artifact.layout import MANIFEST

    from ..engine.engine import Engine
    from ..engine.grammar import Compiler
    from ..http.tokenizer import Tokenizer
    from ..model.runner import open_runner
    from ..paging.faults import FAULTS

    folder, name = model
    is_artifact = (folder / MANIFEST).is_file()
    tokenizer = Tokenizer.load(folder / "decode" if is_artifact else folder)
    runner = open_runner(folder, config, name)
    facts = runner.facts
    engine = Engine(
        runner,
        config,
        tokenizer.vocabulary,
        compiler=Compiler(tokenizer.raw.to_str(), facts.vocab_size, facts.eos_token_ids),
        fault=FAULTS[fault]() if fault else None,
        scribble=runner.scribble,
    )
    return Assembled(engine, tokenizer, Artifact.open(folder).manifest.pair_id if is_artifact else None)
