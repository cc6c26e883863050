"""The model of a worker. The one module here that needs torch; only workers import it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.artifact import Artifact
from quantkit.artifact.layout import MANIFEST

from ..config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from .worker import Loaded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..batch import Batch
    from ..model.runner import ModelRunner


class _Arrays:
    """``worker.WorkerRunner`` of a ``ModelRunner``."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self.facts = runner, runner.facts

    def allocate(self, memory: NDArray[np.uint8]) -> None:
        import torch

        self._runner.allocate(len(memory), torch.from_numpy(memory))

    def run(self, batch: Batch) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._runner.run(batch).numpy()
        return found


def open_model(source: str, name: str | None, config: dict[str, Any]) -> Loaded:
    """Both workers open the same weight sets: what both phases use is mapped from the same file and lies once in
    the page cache; what a worker's phase doesn't use is never read.

    Args:
        source: artifact or checkpoint.
        name: what /v1/models says.
        config: ``EngineConfig`` as ``dataclasses.asdict`` gives it.

    Raises:
        ArtifactError, SourceError, UnsupportedError, UsageError: as ``open_runner``.
    """
    from ..model.runner import open_runner

    settings = EngineConfig(
        ModelConfig(**config["model"]), CacheConfig(**config["cache"]), SchedulerConfig(**config["scheduler"])
    )
    runner = open_runner(source, settings, name)
    return Loaded(_Arrays(runner), pair_id(source))


def pair_id(source: str) -> str | None:
    """Of an artifact; None of a plain checkpoint."""
    return Artifact.open(source).manifest.pair_id if (Path(source) / MANIFEST).is_file() else None
