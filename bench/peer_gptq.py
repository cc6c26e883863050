"""The peer of bench_gptq: llm-compressor's GPTQ of one expert, its own functions in its own order, without hooks.

Runs in an environment of its own that has llmcompressor (see bench/peer_env.py), never in quantkit's:

    python bench/peer_gptq.py HIDDEN INTERMEDIATE TOKENS GROUP_SIZE EXPERTS

Prints the seconds of each expert, one a line. As in its modifier, every linear has a Hessian of its own and static
activation order; loading, hooks and packing are left out, which is in its favour.
"""

from __future__ import annotations

import sys
import time

import torch
from compressed_tensors.quantization import ActivationOrdering, QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from llmcompressor.modifiers.gptq.helpers import accumulate_hessian


def linear(weight: torch.Tensor, inputs: torch.Tensor, args: QuantizationArgs) -> None:
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    hessian = torch.zeros(weight.shape[1], weight.shape[1])
    hessian, count = accumulate_hessian(inputs, module, hessian, torch.zeros(()))
    groups = weight.reshape(weight.shape[0], -1, args.group_size)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    quantize_weight(
        weight.clone().unsqueeze(0),
        (hessian / count).unsqueeze(0),
        scale.unsqueeze(0),
        zero.unsqueeze(0),
        None,
        args,
    )


def main() -> None:
    hidden, intermediate, tokens, group_size, experts = map(int, sys.argv[1:])
    args = QuantizationArgs(
        num_bits=4, symmetric=True, strategy="group", group_size=group_size, actorder=ActivationOrdering.STATIC
    )
    torch.manual_seed(0)
    gate, up, down = (
        torch.randn(o, i) * 0.02
        for o, i in ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    )
    x, z = torch.randn(tokens, hidden), torch.randn(tokens, intermediate)
    with torch.no_grad():
        for _ in range(experts):
            start = time.perf_counter()
            for weight, inputs in ((gate, x), (up, x), (down, z)):
                linear(weight, inputs, args)
            print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
