"""Reference server: prefill on FP8 weights, decode on INT4 weights, paged FP8 KV cache with page tags.

This package states its purpose only; the server is not part of this version. Its place in the house
(who may import it, what a request will go through) is described in ARCHITECTURE.md.
"""
