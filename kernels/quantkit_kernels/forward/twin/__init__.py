"""Reference implementations in plain torch: the specification of every operation, in float32 arithmetic."""
