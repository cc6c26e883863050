"""The artifact: how it is laid out, written, read, verified and added to.

Import from here; submodules load when their names are used, so that reading a manifest needs no numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .artifact import Artifact as Artifact
    from .attachments import add_attachment as add_attachment
    from .manifest import Manifest as Manifest
    from .records import TensorRecord as TensorRecord
    from .verify import Check as Check
    from .verify import VerifyReport as VerifyReport
    from .verify import verify_artifact as verify_artifact
    from .view import View as View
    from .view import ViewWeight as ViewWeight
    from .view import read_mark as read_mark

_WHERE = {
    "Artifact": "artifact", "Check": "verify", "Manifest": "manifest", "TensorRecord": "records",
    "VerifyReport": "verify", "View": "view", "ViewWeight": "view", "add_attachment": "attachments",
    "read_mark": "view", "verify_artifact": "verify",
}  # fmt: skip
__all__ = [
    "Artifact", "Check", "Manifest", "TensorRecord", "VerifyReport", "View", "ViewWeight",
    "add_attachment", "read_mark", "verify_artifact",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_WHERE[name]}", __name__), name)
