"""transformers' ``generate`` as a peer: python bench/serve/peer_transformers.py MODEL (driven by ``peers.py``)."""

from __future__ import annotations

import sys

import torch
from peer_process import answer

from quantkit_evals.models import load_model


def main(directory: str) -> None:
    model = load_model(directory)
    model.generation_config.eos_token_id = None  # to the last token, as everybody here
    model.generation_config.pad_token_id = 0

    def generate(prompts: list[list[int]], output_len: int) -> int:
        with torch.inference_mode():
            tokens = model.generate(torch.tensor(prompts), max_new_tokens=output_len, do_sample=False)
        return int(tokens.shape[0] * (tokens.shape[1] - len(prompts[0])))

    answer(generate)


if __name__ == "__main__":
    main(sys.argv[1])
