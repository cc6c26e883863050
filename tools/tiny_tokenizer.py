"""A byte-level BPE tokenizer with GLM's role tokens, trained on the text that the model is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SPECIALS = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
CHAT_TEMPLATE = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def train_tokenizer(text: Path, out: Path, vocab_size: int) -> Any:
    """Train on a UTF-8 file, save to ``out`` in the Hugging Face layout and return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(text)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIALS[0], pad_token=SPECIALS[0])
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(out))
    return fast


def encode(tokenizer: Any, text: Path) -> torch.Tensor:
    """All documents (separated by empty lines) as one int64 stream, an end-of-text token after each."""
    stream: list[int] = []
    for encoded in tokenizer.backend_tokenizer.encode_batch(text.read_text(encoding="utf-8").split("\n\n")):
        stream.extend(encoded.ids)
        stream.append(0)
    return torch.tensor(stream, dtype=torch.int64)
