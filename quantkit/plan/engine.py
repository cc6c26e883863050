"""What the engine of a recipe can't do: refused when planning, each with its reason.

Another engine runs its own program. What of a recipe has no counterpart there would be ignored, so it is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import RecipeError
from ..models.role import Role
from ..recipe.sections import FOLDING_METHODS, CalibrationSection
from ..units import format_bytes

if TYPE_CHECKING:
    from ..recipe import Recipe
    from .selection import Modules

LLMCOMPRESSOR = "llmcompressor"
_METHODS = ("gptq", "autoround")
_FOLDS = (
    "llm-compressor folds its AWQ scales into bfloat16 weights and forgets them, so that the decode view could "
    "not state them exactly"
)
_DATA_FREE = "without calibration data quantkit's own engine does the same or better, and holds no model in memory"


def check_engine(recipe: Recipe) -> None:
    """Whether the engine has this method and the options.

    Raises:
        RecipeError: naming the option.
    """
    methods = {recipe.decode.method, *(override.method for override in recipe.overrides)}
    if recipe.engine != LLMCOMPRESSOR:
        if "autoround" in methods:
            raise RecipeError(
                "autoround is run by llm-compressor, not by quantkit's own engine", where="decode.method",
                accepted="gptq, awq, gptq+awq, mse, rtn", hint="Add --engine llmcompressor.",
            )  # fmt: skip
        return
    method = recipe.decode.method
    if method not in _METHODS:
        why = _FOLDS if method in FOLDING_METHODS else _DATA_FREE
        raise RecipeError(
            f"the engine {LLMCOMPRESSOR} is not for {method}: {why}", where="decode.method",
            accepted=", ".join(_METHODS), hint="Leave --engine out, or choose --method gptq.",
        )  # fmt: skip
    if option := next((name for name, is_asked in _unknown_to_it(recipe).items() if is_asked), None):
        raise RecipeError(
            f"has no counterpart in the engine {LLMCOMPRESSOR} with {method}", where=option, hint="Leave it out."
        )


def _unknown_to_it(recipe: Recipe) -> dict[str, bool]:
    """Options that it would have to ignore, and whether they are asked for."""
    given, default = recipe.calibration or CalibrationSection(), CalibrationSection()
    is_gptq = recipe.decode.method == "gptq"
    return {
        "overrides": any(not override.keep for override in recipe.overrides),
        "budget": recipe.budget is not None,
        "calibration.route_all: false": given.route_all is False,
        "calibration.min_tokens": given.min_tokens != default.min_tokens,
        "calibration.down_inputs": given.down_inputs != default.down_inputs,
        "calibration.propagate": not is_gptq and given.propagate != default.propagate,
        "calibration.percdamp": not is_gptq and given.percdamp != default.percdamp,
    }


def check_engine_modules(recipe: Recipe, modules: Modules, chosen: frozenset[str]) -> None:
    """Another engine gets routed experts of the layers that transformers runs.

    Raises:
        RecipeError: something else is chosen.
    """
    for module in sorted(chosen) if recipe.engine == LLMCOMPRESSOR else ():
        role = modules.roles[module]
        if role.is_mtp or role.role is not Role.ROUTED_EXPERT:
            kind = "a multi-token-prediction layer" if role.is_mtp else f"the role {role.role.value}"
            raise RecipeError(
                f"the engine {LLMCOMPRESSOR} is given routed experts only, not {kind}: {module}", where="engine",
                accepted="linears: routed, mtp: keep, and no further pattern in decode.quantize",
            )  # fmt: skip


def engine_warnings(recipe: Recipe, modules: Modules) -> list[str]:
    """What to know before running it."""
    if recipe.engine != LLMCOMPRESSOR:
        return []
    nbytes = 2 * sum(rows * columns for rows, columns in (w.shape for w in modules.weights.values()))
    return [
        f"llm-compressor holds the whole model in memory in BF16 ({format_bytes(nbytes)}), the work of a layer "
        "besides, and needs as much disk while it runs; --max-memory is checked against that and does not lower it"
    ]
