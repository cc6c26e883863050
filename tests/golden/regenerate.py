"""Writes the golden digests anew: ``make golden``.

Run it only when a change of bytes is meant: raise FORMAT_VERSION or NUMERICS_VERSION (quantkit/artifact/layout.py)
with it, keep the old golden file if artifacts of that version exist, and say in the changelog what changed.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from quantkit.artifact import Artifact
from quantkit.artifact.layout import FORMAT_VERSION, MANIFEST
from tests.builders import write_moe
from tests.quantkit.convert.cases import core_digests, run

GOLDEN = Path(__file__).parent / f"artifact-v{FORMAT_VERSION}.json"
CASES: dict[str, dict[str, Any]] = {
    "rtn": {"method": "rtn"},
    "mse": {"method": "mse"},
    "rtn-g128-bf16-rest": {"method": "rtn", "group_size": 128, "rest": "bf16"},
    "make-fp8": {"method": "rtn", "make_fp8": True},
}


def build(case: str, folder: Path) -> Path:
    """The artifact of a golden case: a two-layer model (and its MTP layer) of 4 experts."""
    storage = "bf16" if case == "make-fp8" else None
    source = write_moe(folder / "model", "glm_moe_dsa", storage=storage)
    run(source, folder / "out", **CASES[case])
    return folder / "out"


def digests(artifact: Path) -> dict[str, str]:
    """Core digests, the manifest without the tool's version, which changes with every release."""
    found = core_digests(artifact)
    manifest = Artifact.open(artifact).manifest
    if manifest.render() != (artifact / MANIFEST).read_bytes():
        raise AssertionError("the manifest does not survive reading and writing")
    released = manifest.model_copy(update={"tool": {"name": "quantkit", "version": "any"}})
    found[MANIFEST] = hashlib.sha256(released.render()).hexdigest()
    return {"source_tensor_root": manifest.source.tensor_root, "pair_id": manifest.pair_id} | found


def main() -> None:
    content = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            content[case] = digests(build(case, Path(folder)))
    GOLDEN.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    print(f"{GOLDEN.name}: {sum(map(len, content.values()))} digests")


if __name__ == "__main__":
    main()
