"""Calibrated INT4 of routed experts: quality on the bundled models, speed on GLM-5.2 shapes beside llm-compressor.

    python bench/bench_gptq.py [--models tiny-glm,tiny-qwen3] [--methods gptq,awq,gptq+awq] [--groups 32,128]
                               [--blocks N] [--skip quality|speed] [--json FILE]

Quality: layer by layer, the inputs of the routed experts are captured from transformers' own forward (128 x 256
tokens of the bundled calibration text, layers before already quantized), all experts of the layer are quantized,
and the mean KL divergence to the FP8 weights on held-out text is compared with rtn and mse. float32 arithmetic, so
that only weights differ.

Speed: experts per minute, two of 2048 x 6144 and one of 6144 x 2048, 512 tokens. quantkit runs one expert per
core with one torch thread each, the peer one after the other with all of them, each the faster way for it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

import quantkit_kernels as kernels
from measure import Row, write_rows
from peer_env import peer_python
from quantkit.calibration import GptqSettings, Hessian, fold_expert, gptq, round_by_importance
from quantkit.checkpoint import Checkpoint, open_checkpoint
from quantkit.data import MODELS
from quantkit_evals.dequantized import write_bf16_copy
from quantkit_evals.fidelity import Fidelity, fidelity
from quantkit_evals.models import load_model, quiet
from quantkit_evals.text import token_blocks

CALIBRATION_BLOCKS = 128
HIDDEN, INTERMEDIATE, TOKENS = 6144, 2048, 512
PARTS = ("gate_proj", "up_proj", "down_proj")
PEER_EXPERTS = 3


class _Captured(Exception):
    """Stops a forward pass at the experts of the layer that is wanted."""


def expert_inputs(model: Any, layer: int, blocks: np.ndarray) -> tuple[torch.Tensor, ...]:
    """Hidden states, expert indices and routing weights of all tokens at one layer."""
    found: list[tuple[torch.Tensor, ...]] = []

    def stop(_: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        found.append(tuple(a.clone() for a in arguments))
        raise _Captured

    hook = model.model.layers[layer].mlp.experts.register_forward_pre_hook(stop)
    try:
        with torch.no_grad(), quiet():
            for start in range(0, len(blocks), 16):
                try:
                    model(torch.from_numpy(blocks[start : start + 16]))
                except _Captured:
                    continue
    finally:
        hook.remove()
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def calibrated(
    method: str, group_size: int, weights: list[np.ndarray], x: torch.Tensor, where: str
) -> list[kernels.Int4Weight]:
    """gate, up and down of one expert, down calibrated behind the quantized gate and up."""
    gate, up, down = weights
    settings = GptqSettings(group_size=group_size)
    quantize = gptq if "gptq" in method else round_by_importance

    def behind(g: np.ndarray, u: np.ndarray) -> Hessian:
        inputs = Hessian(down.shape[1], where=f"{where}.down_proj")
        inputs.add(torch.nn.functional.silu(x @ torch.from_numpy(g).T) * (x @ torch.from_numpy(u).T))
        return inputs

    if "awq" in method:
        fold = fold_expert(up, down, behind(gate, up), settings)
        up, down = fold.up, fold.down
    inputs = Hessian(gate.shape[1], where=f"{where}.gate_proj")
    inputs.add(x)
    first = [done.weight for done in quantize([gate, up], inputs, settings)]
    back = [kernels.int4_to_float32(w.packed, w.scale, gate.shape[1]) for w in first]
    return [*first, quantize([down], behind(*back), settings)[0].weight]


def quantized_model(method: str, group_size: int, checkpoint: Checkpoint, copy: Path) -> Any:
    """The model with every routed expert quantized, first layer first."""
    model = load_model(copy, dtype="float32")
    stored, blocks = checkpoint.weights(), token_blocks(copy, "calib", num_blocks=CALIBRATION_BLOCKS)
    is_calibrated = method not in ("rtn", "mse")
    for number, layer in enumerate(model.model.layers):
        if not hasattr(layer.mlp, "experts"):
            continue
        experts = layer.mlp.experts
        captured = expert_inputs(model, number, blocks) if is_calibrated else ()
        for expert in range(experts.gate_up_proj.shape[0]):
            where = f"model.layers.{number}.mlp.experts.{expert}"
            weights = []
            for part in PARTS:
                w = stored[f"{where}.{part}"]
                weights.append(
                    kernels.fp8_to_float32(checkpoint.array(w.weight), checkpoint.scales_float32(w), w.block)
                )
            if is_calibrated:
                tokens = (captured[1] == expert).any(-1)
                done = calibrated(method, group_size, weights, captured[0][tokens], where)
            else:
                done = [kernels.float_to_int4(w, group_size, method) for w in weights]
            bits = [
                kernels.int4_to_bf16(q.packed, q.scale, w.shape[1]) for q, w in zip(done, weights, strict=True)
            ]
            gate, up, down = (torch.from_numpy(kernels.bf16_to_float32(b)) for b in bits)
            with torch.no_grad():
                experts.gate_up_proj[expert].copy_(torch.cat([gate, up]))
                experts.down_proj[expert].copy_(down)
    return model


def quality(name: str, methods: list[str], group_size: int, num_blocks: int | None, copy: Path) -> list[Row]:
    with open_checkpoint(name) as checkpoint:
        models = {m: quantized_model(m, group_size, checkpoint, copy) for m in ("rtn", "mse", *methods)}
    with quiet():
        found: dict[str, Fidelity] = fidelity(
            load_model(copy, dtype="float32"), models, token_blocks(copy, num_blocks=num_blocks)
        )
    rtn = found["rtn"].kl.value
    rows = []
    for method, result in found.items():
        is_best = method == methods[0]
        label, share = f"{name} g{group_size} {method}", result.kl.value / rtn
        rows += [
            Row(f"{label}, mean KL to FP8", result.kl.value, "nats", "standard error", result.kl.stderr),
            Row(f"{label}, mean KL", share, "of rtn", None, None, "<= 0.58" if is_best else None,
                share <= 0.58 if is_best else None),
            Row(f"{label}, perplexity", result.perplexity.value, "", "FP8", result.reference.value),
        ]  # fmt: skip
    return rows


def glm_expert() -> tuple[list[np.ndarray], torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    shapes = ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    weights = [rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02) for shape in shapes]
    generator = torch.Generator().manual_seed(0)
    x, z = (torch.randn(TOKENS, columns, generator=generator) for columns in (HIDDEN, INTERMEDIATE))
    return weights, x, z


def one_expert(weights: list[np.ndarray], x: torch.Tensor, z: torch.Tensor, group_size: int) -> None:
    torch.set_num_threads(1)  # of this thread
    settings = GptqSettings(group_size=group_size)
    for parts, inputs in ((weights[:2], x), (weights[2:], z)):
        hessian = Hessian(inputs.shape[1], where="expert")
        hessian.add(inputs)
        gptq(parts, hessian, settings)


def matmul_share(arguments: tuple[Any, ...]) -> float:
    """Share of an expert's processor time in matrix products, factorisations and triangular solves."""
    from torch.profiler import ProfilerActivity, profile

    names = ("mm", "addmm", "addmv", "cholesky", "triangular")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = time.thread_time()
        one_expert(*arguments)
        whole = time.thread_time() - start
    spent = sum(e.self_cpu_time_total for e in profiler.key_averages() if any(n in e.key for n in names))
    return float(spent) / 1e6 / whole


def speed(group_size: int) -> list[Row]:
    cores = os.cpu_count() or 1
    arguments = (*glm_expert(), group_size)
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(lambda _: one_expert(*arguments), range(cores)))  # warm up
        start = time.perf_counter()
        list(pool.map(lambda _: one_expert(*arguments), range(2 * cores)))
        ours = (time.perf_counter() - start) / (2 * cores)
    peer = Path(__file__).with_name("peer_gptq.py")
    sizes = [str(n) for n in (HIDDEN, INTERMEDIATE, TOKENS, group_size, PEER_EXPERTS)]
    out = subprocess.run(
        [peer_python(), str(peer), *sizes], check=True, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(cores)},
    ).stdout  # fmt: skip
    theirs = min(float(line) for line in out.splitlines() if line[:1].isdigit() and " " not in line)
    share = matmul_share(arguments)
    return [
        Row(f"GLM-5.2 expert, GPTQ g{group_size}", ours, "s", "llm-compressor", theirs),
        Row("experts per minute", 60 / ours, "1/min", "llm-compressor", 60 / theirs, ">= 3x", theirs / ours >= 3),
        Row("time in products and factorisation", share, "of time", None, None, ">= 0.8", share >= 0.8),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--methods", default="gptq,awq,gptq+awq", help="the first is held against the target")
    parser.add_argument("--groups", default="32,128")
    parser.add_argument("--blocks", type=int, help="blocks of held-out text (default: all)")
    parser.add_argument("--skip", choices=("quality", "speed"))
    parser.add_argument("--json")
    args = parser.parse_args()
    rows: list[Row] = [] if args.skip == "speed" else speed(32)
    for name in args.models.split(",") if args.skip != "quality" else ():
        with tempfile.TemporaryDirectory(prefix="quantkit-bench-") as scratch:
            copy = write_bf16_copy(name, Path(scratch) / "bf16")
            for group_size in map(int, args.groups.split(",")):
                rows += quality(name, args.methods.split(","), group_size, args.blocks, copy)
                print(rows[-1].name, "done", file=sys.stderr)
    write_rows(rows, args.json)


if __name__ == "__main__":
    main()
