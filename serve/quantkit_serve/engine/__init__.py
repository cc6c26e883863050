"""The engine: which requests run in a step, what the step's arrays are, which tokens follow, what text they are.

Read in this order: ``sequence``, ``scheduler``, ``batching``, ``engine`` (one step), ``choosing`` with
``sampler``, ``weights`` and ``logprobs``, ``answering`` with ``vocabulary``, ``detokenizer`` and ``grammar``,
``outputs``; then ``speculation``, by which a step gives several tokens.
``limits`` decides what is taken at all; ``loop`` runs it in threads, with a ``stream`` per answer; ``counters`` is
what others see. No torch.
"""
