"""On the device torch's operations do, which a compiler or a graph can fuse; see ``twin/rows``."""

from quantkit_kernels.forward.twin.rows import rms_norm, rotate

__all__ = ["rms_norm", "rotate"]
