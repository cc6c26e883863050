"""Models and text that ship with quantkit, with pinned digests.

``tiny-glm`` and ``tiny-qwen3`` are trained models of 14.5 and 12.5 million parameters in the FP8 block layout of
their large relatives (the scripts in ``tools/`` made them); ``calib`` and ``heldout`` are public-domain English
that neither model was trained on. They make the demo, the tests and the quality figures work without a network.
``digests.json`` pins every file; a retraining need not be bit-equal to it.

Left out: anything that needs numpy or torch. Reading the files is the checkpoint reader's business.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ..errors import EnvironmentProblem, UsageError

ROOT = Path(__file__).parent
MODELS: dict[str, str] = {"tiny-glm": "tiny-glm-5.2-fp8", "tiny-qwen3": "tiny-qwen3-moe-fp8"}
TEXTS: dict[str, str] = {"calib": "calib.txt", "heldout": "heldout.txt"}


def bundled_model(name: str) -> Path:
    """Directory of a bundled model (``tiny-glm`` or ``tiny-qwen3``).

    Raises:
        UsageError: no bundled model has this name.
        EnvironmentProblem: the installation lacks its files.
    """
    return _path("model", name, "models", MODELS)


def bundled_text(name: str) -> Path:
    """File of a bundled text in UTF-8: ``calib`` (for calibration) or ``heldout`` (for measuring).

    Raises:
        UsageError: no bundled text has this name.
        EnvironmentProblem: the installation lacks the file.
    """
    return _path("text", name, "text", TEXTS)


def pinned_digests() -> dict[str, str]:
    """Path relative to this package (with ``/``) -> sha256 of the file, for every bundled file."""
    pins: dict[str, str] = json.loads((ROOT / "digests.json").read_text(encoding="utf-8"))
    return pins


def verify_bundled(name: str | None = None) -> list[str]:
    """Compare bundled files with their pinned digests.

    Args:
        name: a bundled model or text; None checks everything.

    Returns:
        One sentence for each file that is missing, changed or not pinned; empty when all is well.

    Raises:
        UsageError: nothing bundled has this name.
    """
    below: tuple[str, ...]
    if name is None:
        below = ("models/", "text/")
    elif name in MODELS:
        below = (f"models/{MODELS[name]}/",)
    elif name in TEXTS:
        below = (f"text/{TEXTS[name]}",)
    else:
        raise _unknown("model or text", name, {**MODELS, **TEXTS})
    found = {
        p.relative_to(ROOT).as_posix(): p for d in ("models", "text") for p in (ROOT / d).rglob("*") if p.is_file()
    }
    pins = {k: v for k, v in pinned_digests().items() if k.startswith(below)}
    problems = [f"{k}: missing" for k in sorted(pins.keys() - found.keys())]
    problems += [f"{k}: not pinned" for k in sorted(found.keys() - pins.keys()) if k.startswith(below)]
    for key in sorted(pins.keys() & found.keys()):
        if (seen := _sha256(found[key])) != pins[key]:
            problems.append(f"{key}: sha256 {seen}, pinned {pins[key]}")
    return problems


def _path(kind: str, name: str, folder: str, table: dict[str, str]) -> Path:
    if name not in table:
        raise _unknown(kind, name, table)
    path = ROOT / folder / table[name]
    if not path.exists():
        raise EnvironmentProblem(
            f"the bundled {kind} {name!r} is not part of this installation",
            where=str(path),
            hint="Install quantkit from its wheel or source tree with package data.",
        )
    return path


def _unknown(kind: str, name: str, table: dict[str, str]) -> UsageError:
    return UsageError(f"no bundled {kind} is called {name!r}", accepted=", ".join(table))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
