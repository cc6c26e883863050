"""The model of an artifact or checkpoint, computed step by step over pages: everything that touches tensors.

loader, weights     the views' tensors, mapped; one weight set per phase, shared tensors once
spec, rope, norm    what config.json says of running the model, and the small parts
attention, gqa ...  the attention of a layer; ``attention`` is the protocol
experts             dense MLP, router and routed experts
decoder             the layers, from token ids to logits
prediction          the multi-token-prediction layer behind them
ops                 the operations behind it: ``KernelOps`` in bfloat16, ``ReferenceOps`` in float32
pages               memory of the page pool
step                a ``Batch`` checked and in tensors
runner              ``batch.Runner``: what an engine sees
"""
