"""Prefill and decode in two worker processes over one page pool in shared memory (``--split``).

Read in this order: ``config``, ``memory`` (what is shared), ``wire`` (what is said), ``worker`` (the child),
``process`` (the child as the engine's process sees it), ``remote_runner`` (one that comes back when it dies),
``pair`` (both, as a ``batch.Runner``), ``handoff``, ``scheduler``, ``engine``.

The engine's process owns the allocator, counts, tags, scheduling, sampling and text; all of it is the code of the
single process. A worker has weights and maps the pool's bytes. It is given the arrays of a step, page lists among
them, and answers with logits: it remembers nothing between two steps, so nothing is lost with it but the step that
it was computing. No torch here but in ``load``, which only a worker imports.
"""
