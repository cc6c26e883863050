"""The model card: what a hub shows of an artifact, with the metadata that links it to its base model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...units import format_bytes

if TYPE_CHECKING:
    from ..manifest import Manifest


def render_card(
    manifest: Manifest, report: Mapping[str, Any], base: str | None, evaluation: str | None = None
) -> bytes:
    """README.md of an artifact.

    Args:
        manifest, report: of the artifact.
        base: Hub id of the base model, where one is known.
        evaluation: a Markdown section with measured quality, once there is one.
    """
    title = f"{base or manifest.source.family} in dual precision"
    lines = [*_front_matter(base), f"# {title}", "", _introduction(base), "", *_view_table(manifest), ""]
    lines += ["## Quality", "", *_quality(report), ""]
    if evaluation:
        lines += [evaluation.strip(), ""]
    lines += [
        "## Identity", "",
        f"- pair: `{manifest.pair_id}`",
        f"- source tensors: `{manifest.source.tensor_root}` ({manifest.source.num_tensors:,} tensors)",
        f"- made by quantkit {manifest.tool['version']}; check it with `quantkit verify DIRECTORY`", "",
    ]  # fmt: skip
    return "\n".join(lines).encode()


def _front_matter(base: str | None) -> list[str]:
    lines = ["---"]
    if base:
        lines += [f"base_model: {json.dumps(base)}", "base_model_relation: quantized"]
    return [
        *lines,
        "library_name: transformers",
        "tags:",
        "- quantkit",
        "- compressed-tensors",
        "- fp8",
        "- int4",
        "---",
        "",
    ]


def _introduction(base: str | None) -> str:
    of = f" of [{base}](https://huggingface.co/{base})" if base else ""
    return (
        f"Two views{of}: `prefill/` in FP8, `decode/` with INT4 weights. Each is a complete checkpoint; "
        "a server that runs both checks that their `quantkit_view.json` name the same pair."
    )


def _view_table(manifest: Manifest) -> list[str]:
    lines = ["| view | tensors | tensor data | weights |", "|---|---:|---:|---|"]
    for name, view in sorted(manifest.views.items()):
        whose = "the publisher's, unchanged" if view.origin == "publisher" else "derived"
        if view.stored == "reference":
            whose += " (digests only, bytes not included)"
        lines.append(f"| `{name}/` | {view.num_tensors:,} | {format_bytes(view.nbytes)} | {whose} |")
    return lines


def _quality(report: Mapping[str, Any]) -> list[str]:
    lines = ["| view | weights rounded | relative error, mean | largest |", "|---|---:|---:|---:|"]
    for view, errors in sorted(report["errors"].items()):
        total = errors["all"]
        lines.append(f"| `{view}/` | {total['weights']:,} | {total['rms']:.3%} | {total['max']:.3%} |")
    if not report["errors"]:
        return ["No tensor was rounded."]
    if kept := report.get("amendments"):
        layers = ", ".join(str(amendment["layer"]) for amendment in kept)
        lines += ["", f"Kept unquantized by the quality budget: layers {layers}."]
    return [
        *lines,
        "",
        "Errors are of the weights, against the source. By layer and projection: `attachments/report.html`.",
    ]
