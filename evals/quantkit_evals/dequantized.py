"""BF16 copies of checkpoints and views, as evaluation uses them; see ``quantkit.artifact.bf16_copy``."""

from quantkit.artifact.bf16_copy import bf16_copy_bytes, dequantize_bf16, plain_config, write_bf16_copy

__all__ = ["bf16_copy_bytes", "dequantize_bf16", "plain_config", "write_bf16_copy"]
