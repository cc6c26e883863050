"""On the device torch's operations do; see ``twin/route``."""

from quantkit_kernels.forward.twin.route import route

__all__ = ["route"]
