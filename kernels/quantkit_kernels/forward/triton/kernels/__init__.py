"""The device code. Kernels end in ``_kernel``, the rest is inlined. Typed by Triton, not by mypy."""
