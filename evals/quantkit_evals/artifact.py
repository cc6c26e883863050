"""What the INT4 weights of an artifact cost: its decode view against its prefill view on held-out text.

Both views are written as BF16 copies (``dequantized``), loaded with transformers and run on the CPU, so the two
differ in nothing but the weights. The noise floor is the prefill view against itself, run one block at a time
instead of several: what rounding in another order of the same arithmetic does. A difference near it says nothing.

Left out: models that do not fit in memory twice, and what an engine's kernels add.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import EnvironmentProblem
from quantkit.units import format_bytes

from .dequantized import bf16_copy_bytes, write_bf16_copy
from .extras import require
from .fidelity import Fidelity, fidelity
from .models import load_model, quiet
from .text import BLOCK_TOKENS, text_path, token_blocks

if TYPE_CHECKING:
    from quantkit.artifact import Artifact

    from .statistics import Mean, Quantile

ATTACHMENT = "evals/fidelity.json"
TOKENS = 8192
_BATCH_ELEMENTS = 128 << 20  # logits of one model at once
_MOST_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class ArtifactFidelity:
    """See the module docstring.

    Attributes:
        pair_id: of the artifact.
        text_name, text_sha256: what was measured on.
        dtype: of the arithmetic.
        decode: decode view against prefill view.
        floor: prefill view against itself.
    """

    pair_id: str
    text_name: str
    text_sha256: str
    dtype: str
    decode: Fidelity
    floor: Fidelity

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; a standard error over one block is null."""
        transformers, torch = require("transformers"), require("torch")
        reference = self.decode.reference
        return {
            "pair_id": self.pair_id,
            "text": {"name": self.text_name, "sha256": self.text_sha256},
            "blocks": len(reference.block_nll), "block_tokens": BLOCK_TOKENS,
            "predicted_tokens": reference.num_tokens, "dtype": self.dtype,
            "perplexity": {"prefill": _figure(reference), "decode": _figure(self.decode.perplexity)},
            "nll": {"prefill": _figure(reference.nll), "decode": _figure(self.decode.perplexity.nll)},
            "decode": _against(self.decode), "noise_floor": _against(self.floor),
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        }  # fmt: skip


class _OneByOne:
    """A model that runs the blocks of a batch one by one."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, input_ids: Any, use_cache: bool) -> Any:
        import torch

        parts = [self._model(input_ids=one, use_cache=use_cache).logits for one in input_ids.split(1)]
        return _Output(torch.cat(parts))


@dataclass(frozen=True, slots=True)
class _Output:
    logits: Any


def measure_artifact(
    artifact: Artifact, *, text: str = "heldout", num_tokens: int = TOKENS, dtype: str = "bfloat16",
    say: Callable[[str], None] = lambda _: None,
) -> ArtifactFidelity:  # fmt: skip
    """Measure; see the module docstring.

    Args:
        text: ``heldout``, ``calib`` or the path of a UTF-8 file.
        num_tokens: rounded down to whole blocks of ``BLOCK_TOKENS``, spread over the text.
        dtype: ``bfloat16`` or ``float32`` arithmetic; the weights are BF16 in both.
        say: told what happens now.

    Raises:
        UsageError: no such text, or too short.
        ArtifactError: a view is stored as a reference.
        SourceError: a view is damaged, or not a model that transformers loads.
        EnvironmentProblem: the extra ``eval`` is not installed, or not enough temporary space.
    """
    import hashlib

    for module in ("transformers", "torch"):
        require(module)
    views = {"prefill": artifact.prefill.tensors, "decode": artifact.decode.tensors}
    blocks = token_blocks(artifact.decode.path, text, num_blocks=num_tokens // BLOCK_TOKENS)
    needed = sum(bf16_copy_bytes(view) for view in views.values())
    with tempfile.TemporaryDirectory(prefix="quantkit-fidelity-") as scratch:
        _check_space(scratch, needed)
        say(f"writing both views as BF16 copies: {format_bytes(needed)} of temporary space in {scratch}")
        models = {}
        for name, view in views.items():
            models[name] = load_model(write_bf16_copy(view, Path(scratch, name)), dtype=dtype)
        say(f"running both on {blocks.size:,} tokens")
        candidates = {"decode": models["decode"], "floor": _OneByOne(models["prefill"])}
        with quiet():
            found = fidelity(
                models["prefill"], candidates, blocks, batch_blocks=_batch_blocks(views["decode"].config)
            )
    sha256 = hashlib.sha256(text_path(text).read_bytes()).hexdigest()
    pair = artifact.manifest.pair_id
    return ArtifactFidelity(pair, Path(text).name, sha256, dtype, found["decode"], found["floor"])


def check_writable(artifact: Artifact) -> None:
    """Whether figures could be kept; asked before they are measured.

    Raises:
        EnvironmentProblem: the artifact cannot be written to.
    """
    try:
        with tempfile.TemporaryFile(dir=artifact.path):
            pass
    except OSError as problem:
        raise EnvironmentProblem(
            f"cannot keep figures here ({problem.strerror})", where=str(artifact.path),
            hint="Omit --attach (eval: give --no-attach), or make the artifact writable.",
        ) from problem  # fmt: skip


def keep(artifact: Artifact, figures: dict[str, Any]) -> Path:
    """Attach the figures (``to_json``) to the artifact, in place of older ones; returns the file.

    Raises:
        EnvironmentProblem: the disk refuses.
    """
    from quantkit.artifact import add_attachment
    from quantkit.artifact.canonical import readable_json

    return add_attachment(artifact, ATTACHMENT, readable_json(figures), replace=True)


def _batch_blocks(config: dict[str, Any]) -> int:
    """Blocks at once: at least two, or the noise floor would be the same run twice."""
    vocabulary = config.get("text_config", config).get("vocab_size") or 1
    return max(2, min(_MOST_BLOCKS, _BATCH_ELEMENTS // (BLOCK_TOKENS * vocabulary)))


def _check_space(scratch: str, needed: int) -> None:
    free = shutil.disk_usage(scratch).free
    if needed > free:
        raise EnvironmentProblem(
            f"BF16 copies of both views need {format_bytes(needed)} of temporary space, {format_bytes(free)} are "
            "free", where=str(Path(scratch).parent), hint="Set TMPDIR to a directory on a larger disk.",
        )  # fmt: skip


def _against(found: Fidelity) -> dict[str, Any]:
    figures = {
        "nll_difference": found.nll_difference, "kl_mean": found.kl, "kl_median": found.kl_quantile(0.5),
        "kl_99": found.kl_quantile(0.99), "top1_agreement": found.agreement, "flips_lost": found.lost,
        "flips_gained": found.gained,
    }  # fmt: skip
    return {name: _figure(figure) for name, figure in figures.items()}


def _figure(figure: Mean | Quantile | Any) -> dict[str, float | None]:
    return {"value": figure.value, "stderr": None if math.isnan(figure.stderr) else figure.stderr}
