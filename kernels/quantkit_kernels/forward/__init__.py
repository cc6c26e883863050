"""Operations of the forward pass, torch tensors in and out: linears, experts, paged attention, the paged cache.

Each is one function that checks its arguments and calls one of three implementations (``choice.py``): ``twin``,
the torch reference and specification; ``cpu``, native C++; ``triton``. Importing this imports torch, importing
``quantkit_kernels`` does not.
"""
