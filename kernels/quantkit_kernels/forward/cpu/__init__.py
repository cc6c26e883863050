"""Bindings of the native operations in kernels/csrc; arguments were checked by the callers."""
