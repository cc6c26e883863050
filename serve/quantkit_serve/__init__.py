"""Reference server: prefill on FP8 weights, decode on INT4 weights, paged FP8 KV cache with page tags.

Layers, top first: ``http``; ``engine`` (scheduling, sampling, the loop); ``model`` (torch) and ``paging`` (no
torch); the plain types that they exchange (``config``, ``batch``, ``request``, ``service``, ``refusal``).
"""
