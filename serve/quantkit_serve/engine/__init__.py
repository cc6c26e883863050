"""The engine: which requests run in a step, what the step's arrays are, which tokens follow, what text they are.

Read in this order: ``sequence``, ``scheduler``, ``batching``, ``engine`` (one step), ``sampler``, ``vocabulary``,
``detokenizer``, ``grammar``; ``limits`` decides what is taken at all, ``loop`` runs it in a thread. No torch.
"""
