"""The twin, where the native operations are not built in yet."""

from quantkit_kernels.forward.twin.linear import fp8_linear, int4_linear

__all__ = ["fp8_linear", "int4_linear"]
