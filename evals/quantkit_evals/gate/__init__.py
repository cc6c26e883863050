"""Gates: limits in a YAML file that a comparison is held against, and the verdict.

Names are resolved on first use, so that importing the package costs neither pydantic nor YAML.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .judging import judge as judge
    from .load import find_gate as find_gate
    from .load import gate_names as gate_names
    from .load import load_gate as load_gate
    from .margins import margins_of as margins_of
    from .refusal import check_gate as check_gate
    from .schema import Gate as Gate

# everything else lives in load
_HOME = {"Gate": "schema", "check_gate": "refusal", "judge": "judging", "margins_of": "margins"}

__all__ = ["Gate", "check_gate", "find_gate", "gate_names", "judge", "load_gate", "margins_of"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME.get(name, 'load')}", __name__), name)
