"""``manifest.json``: what an artifact is, from what it was made and which bytes belong to it.

Core content only: no clock, no host, no path of the machine, so that the same source, recipe and version give the
same bytes wherever they run. A local source is known by its digests (a directory name says nothing); a hub or
bundled one also by its label and revision. Whoever needs times finds them in the attachments.

``pair_id`` is what the two views of an artifact share and views of different artifacts don't.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import ArtifactError
from .amendment import Amendment
from .canonical import digest_json, parse_json, readable_json
from .layout import FORMAT_VERSION, JOURNAL, MANIFEST, NEWEST_FORMAT_VERSION, NUMERICS_VERSION, VIEWS

MAX_MANIFEST_BYTES = 256 << 20


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Closed):
    """Size and sha256 of one file."""

    nbytes: int
    sha256: str


class Source(_Closed):
    """What the artifact was made from. ``label`` and ``revision`` only where they mean the same everywhere.

    ``tensor_root`` is the digest over name, dtype, shape and sha256 of every source tensor; ``files`` are the
    publisher's weight files and their digests, equal to the ones a hub states.
    """

    kind: Literal["local", "hub", "bundled"]
    label: str | None
    revision: str | None
    family: str
    model_type: str | None
    config_sha256: str | None
    num_tensors: int
    tensor_root: str
    files: dict[str, FileEntry]


class ViewEntry(_Closed):
    """One view: whose bytes it holds, whether it holds them, and the digest over its tensors.

    ``origin``: ``publisher`` when its weight files are the source's own, else ``derived``. ``stored``:
    ``reference`` when only digests are recorded. ``transforms`` names what was done to tensors that are neither
    quantized nor byte-identical (``fp8-to-bf16``, ``bf16-to-fp8``, ``int4-to-fp8``).
    """

    origin: Literal["publisher", "derived"]
    stored: Literal["files", "reference"]
    num_tensors: int
    nbytes: int
    tensor_root: str
    transforms: tuple[str, ...]


class Manifest(_Closed):
    """The contract; see the module docstring. ``files`` lists every core file but the manifest itself."""

    format_version: int
    numerics_version: int
    tool: dict[str, str]
    pair_id: str
    source: Source
    recipe: dict[str, Any]
    engine: str
    calibration_sha256: str | None
    views: dict[Literal["prefill", "decode"], ViewEntry]
    counts: dict[str, dict[str, int]]
    files: dict[str, FileEntry]
    plan_amendments: tuple[Amendment, ...]

    def render(self) -> bytes:
        """The file's bytes; deterministic."""
        return readable_json(self.model_dump(mode="json"))

    def expected_pair_id(self) -> str:
        """``pair_id`` computed anew from what it covers."""
        return pair_id(
            self.source.tensor_root, self.recipe, self.engine, self.calibration_sha256,
            format_version=self.format_version, numerics_version=self.numerics_version,
        )  # fmt: skip


def pair_id(
    source_root: str, recipe: Mapping[str, Any], engine: str, calibration_sha256: str | None,
    *, format_version: int = FORMAT_VERSION, numerics_version: int = NUMERICS_VERSION,
) -> str:  # fmt: skip
    """sha256 over everything that decides the bytes of both views, and nothing that does not."""
    return digest_json({
        "format_version": format_version, "numerics_version": numerics_version, "source": source_root,
        "recipe": dict(recipe), "engine": engine, "calibration": calibration_sha256,
    })  # fmt: skip


def load_manifest(directory: Path) -> Manifest:
    """Read the manifest of an artifact.

    Raises:
        ArtifactError: no manifest, not readable as one, or of a format version this quantkit does not know.
    """
    path = directory / MANIFEST
    if not directory.is_dir():
        what = "not an artifact but a file" if directory.exists() else "no such directory"
        raise ArtifactError(what, where=str(directory), accepted="the directory of an artifact")
    if not path.is_file():
        if (directory / JOURNAL).is_file():
            raise ArtifactError(
                "an unfinished conversion",
                where=str(directory),
                hint="Run the same convert command again: it resumes",
            )
        raise ArtifactError(f"not an artifact: there is no {MANIFEST}", where=str(directory))
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise ArtifactError(f"larger than {MAX_MANIFEST_BYTES >> 20} MiB: not a manifest", where=str(path))
    try:
        content = parse_json(path.read_bytes())
    except ValueError as problem:
        raise ArtifactError(f"not valid JSON ({problem})", where=str(path)) from problem
    if not isinstance(content, dict) or not isinstance(content.get("format_version"), int):
        raise ArtifactError("not a quantkit manifest: no format_version", where=str(path))
    if content["format_version"] > NEWEST_FORMAT_VERSION:
        raise ArtifactError(
            f"format version {content['format_version']}", where=str(path),
            accepted=f"up to {NEWEST_FORMAT_VERSION}", hint="Install a newer quantkit",
        )  # fmt: skip
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as problem:
        first = problem.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ArtifactError(f"not a valid manifest: {key}: {first['msg']}", where=str(path)) from problem
    if absent := [view for view in VIEWS if view not in manifest.views]:
        raise ArtifactError(f"not a valid manifest: there is no {absent[0]} view", where=str(path))
    return manifest
