"""From what a user names to candidates: the baseline of a model, and what is held against it.

Left out: loading. A candidate loads its model when it is first needed, so that everything can be refused before.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quantkit.errors import UsageError

from .configuration import Configuration, KvDtype, WeightSet
from .configuration import Path as ScoringPath
from .publisher import publisher_weights, stored_weights
from .run_file import HEADER, read_run

if TYPE_CHECKING:
    from quantkit.artifact.manifest import Manifest
    from quantkit_serve.start.servable import Servable

    from .candidates.candidate import Candidate
    from .candidates.engine import EngineCandidate
    from .run import Run

DECODED_CONTEXT = 1  # tokens of a context: so that every scored token, the first as well, comes from a decode step


@dataclass(frozen=True, slots=True)
class Choice:
    """What is to be evaluated.

    Attributes:
        weights: sets under test; empty: ``dual`` of an artifact, the one that a plain checkpoint has, and none
            where an endpoint or a model of transformers is given.
        kv_dtypes: of each; empty: ``fp8``, with float32 arithmetic ``f32``.
        path: ``auto`` is decode if any candidate needs it, else prefill.
        compute, fp8_activations: of all of our engine.
        endpoint, endpoint_model: an OpenAI-style server (its URL), and what it calls the model.
        transformers: directory of a model that transformers runs.
        baseline: a run, or the directory of the source checkpoint; None: the publisher's view of the model itself.
        kv_bytes: memory of the pages, for each candidate.
    """

    weights: tuple[WeightSet, ...] = ()
    kv_dtypes: tuple[KvDtype, ...] = ()
    path: Literal["auto", "prefill", "decode"] = "auto"
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    fp8_activations: Literal["none", "dynamic128"] = "none"
    endpoint: str | None = None
    endpoint_model: str | None = None
    transformers: Path | None = None
    baseline: Path | None = None
    kv_bytes: int = 1 << 30


def choose(model: Servable, choice: Choice) -> tuple[Candidate | Run, list[Candidate]]:
    """The baseline, and the candidates in the order in which they are shown.

    Raises:
        UsageError: weights that the model doesn't have, a baseline that is none, nothing but the baseline.
        ArtifactError: a manifest or a run that can't be read.
        SourceError, UnsupportedError: a plain checkpoint that can't be read.
    """
    manifest = _manifest(model)
    found = _configurations(choice, None if manifest is not None else stored_weights(model.folder))
    path: ScoringPath
    if choice.path == "auto":
        path = "decode" if any(made.needs_decode for made in found) else "prefill"
    else:
        path = choice.path
    wanted = [_on(model, choice, made, path, label=_label(manifest, made.kv_dtype)) for made in found]
    baseline = _baseline(model, manifest, choice, path)
    own: list[Candidate] = [one for one in wanted if not _is_same(one, baseline)]
    candidates = own + _others(model, choice)
    if not candidates:
        raise UsageError(
            f"{wanted[0].label} is the baseline itself",
            where="--weights",
            accepted="other weights, or other KV pages",
        )
    return baseline, candidates


def _configurations(choice: Choice, stored: WeightSet | None) -> list[Configuration]:
    """
    Args:
        stored: the one weight set of a plain checkpoint; None: an artifact, which has all.
    """
    others = choice.endpoint is not None or choice.transformers is not None
    if not choice.weights and others:
        return []
    weights = choice.weights or (stored or "dual",)
    missing = [one for one in weights if stored is not None and one != stored]
    if missing:
        raise UsageError(
            f"a plain checkpoint has no {', '.join(missing)} weights", where="--weights",
            accepted=stored, hint="`quantkit convert` makes an artifact of it.",
        )  # fmt: skip
    kv_dtypes = choice.kv_dtypes or (("f32",) if choice.compute == "float32" else ("fp8",))
    return [
        Configuration(w, kv, compute=choice.compute, fp8_activations=choice.fp8_activations)
        for w in dict.fromkeys(weights)
        for kv in dict.fromkeys(kv_dtypes)
    ]


def _on(
    model: Servable, choice: Choice, made: Configuration, path: ScoringPath, *, label: str | None = None
) -> EngineCandidate:
    from dataclasses import replace

    from .candidates.engine import EngineCandidate

    return EngineCandidate(
        model, replace(made, path=path), kv_bytes=choice.kv_bytes, decoded_context=DECODED_CONTEXT, label=label
    )


def _baseline(
    model: Servable, manifest: Manifest | None, choice: Choice, path: ScoringPath
) -> EngineCandidate | Run:
    kv: KvDtype = "f32" if choice.compute == "float32" else "bf16"
    label = _label(manifest, kv)
    if choice.baseline is not None:
        if (choice.baseline / HEADER).is_file():
            return read_run(choice.baseline)
        from quantkit.checkpoint import BUNDLED
        from quantkit_serve.start.servable import servable

        if not choice.baseline.expanduser().is_dir() and str(choice.baseline) not in BUNDLED:
            raise UsageError(
                f"no run and no checkpoint: {choice.baseline}", where="--baseline",
                accepted="a folder of a run that was kept, or a checkpoint's directory",
            )  # fmt: skip
        model = servable(str(choice.baseline))
        manifest = _manifest(model)
        label = f"{model.name}, {kv} KV"  # another model, whose weights may be of any kind
    weights = stored_weights(model.folder) if manifest is None else publisher_weights(manifest)
    made = Configuration(weights, kv, compute=choice.compute, fp8_activations=choice.fp8_activations)
    return _on(model, choice, made, path, label=label)


def _label(manifest: Manifest | None, kv: KvDtype) -> str | None:
    """For reports: a plain checkpoint has what it stores, FP8 or not; None leaves it to the weight set."""
    return f"as published, {kv} KV" if manifest is None else None


def _is_same(one: EngineCandidate, baseline: EngineCandidate | Run) -> bool:
    from .run import Run

    if isinstance(baseline, Run) or one.configuration != baseline.configuration:
        return False
    return one.model.folder.resolve() == baseline.model.folder.resolve()


def _others(model: Servable, choice: Choice) -> list[Candidate]:
    found: list[Candidate] = []
    if choice.endpoint is not None:
        from .candidates.endpoint import EndpointCandidate

        folder = model.folder / "decode" if _manifest(model) is not None else model.folder
        found.append(EndpointCandidate(choice.endpoint, tokenizer=folder, model=choice.endpoint_model))
    elif choice.endpoint_model is not None:
        raise UsageError("is for a server", where="--endpoint-model", accepted="with --endpoint")
    if choice.transformers is not None:
        from quantkit_serve.start.servable import servable

        from .candidates.transformers_model import TransformersCandidate

        found.append(TransformersCandidate(servable(str(choice.transformers)), dtype=choice.compute))
    return found


def _manifest(model: Servable) -> Manifest | None:
    from quantkit.artifact.layout import MANIFEST
    from quantkit.artifact.manifest import load_manifest

    return load_manifest(model.folder) if (model.folder / MANIFEST).is_file() else None
