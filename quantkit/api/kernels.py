"""The kernels, chosen before any work begins."""

from __future__ import annotations

from ..errors import EnvironmentProblem


def check_kernels() -> None:
    """Choose the kernels now, so that a wrong setting is an error before any work.

    Raises:
        EnvironmentProblem: QUANTKIT_KERNELS or QUANTKIT_CPU_ISA asks for what does not exist.
    """
    import quantkit_kernels

    try:
        quantkit_kernels.backend()
    except ValueError as error:
        hint = "Unset the variable to let quantkit choose; `quantkit env` shows what there is."
        raise EnvironmentProblem(str(error), where="kernels", hint=hint) from error
