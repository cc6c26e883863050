"""On the device torch's operations do, which a compiler or a graph can fuse; see ``twin/rows``."""

from quantkit_kernels.forward.twin.rows import add, rms_norm, rotate

__all__ = ["add", "rms_norm", "rotate"]
