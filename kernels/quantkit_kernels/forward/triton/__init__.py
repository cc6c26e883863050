"""Triton kernels for NVIDIA GPUs from sm_90; ``TRITON_INTERPRET=1`` runs them without one."""
