"""The twin, where the native operations are not built in yet."""

from quantkit_kernels.forward.twin.experts import moe_fp8, moe_int4

__all__ = ["moe_fp8", "moe_int4"]
