"""The peer of bench_convert: llm-compressor's model_free_ptq over its FP8BlockDequantizer, INT4 experts.

Runs in an environment of its own that has llmcompressor (see bench/peer_env.py), never in quantkit's:

    python bench/peer_model_free_ptq.py SOURCE OUT GROUP_SIZE WORKERS

Only what both tools do is asked for: routed experts to INT4 with the given group size, everything else left
alone. It dequantizes every FP8 weight first (its dequantizer takes the targets it is given; here the experts
only, so that the rest passes through, which is the cheapest way to run it on this task).
"""

from __future__ import annotations

import sys

from compressed_tensors.entrypoints.convert import FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from llmcompressor import model_free_ptq

EXPERTS = r"re:.*\.mlp\.experts\.\d+\.(gate|up|down)_proj$"


def main() -> None:
    source, out, group_size, workers = sys.argv[1:5]
    weights = QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=int(group_size), observer="minmax"
    )
    model_free_ptq(
        model_stub=source,
        save_directory=out,
        config=QuantizationConfig(
            config_groups={"experts": QuantizationScheme(targets=[EXPERTS], weights=weights)},
            ignore=["lm_head", "model.embed_tokens"],
        ),
        max_workers=int(workers),
        device="cpu",
        converter=FP8BlockDequantizer(
            targets=[EXPERTS], ignore=[r"re:.*(self_attn|shared_experts|mlp\.(gate|up|down)_proj).*"]
        ),
    )


if __name__ == "__main__":
    main()
