"""lm-eval on our candidates: the model that it sees, the answers that are kept, and its results as a ``Run``."""
