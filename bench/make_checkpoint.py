"""Write an FP8 block-scaled checkpoint with the layer shapes of GLM-5.2 and few layers and experts.

    python bench/make_checkpoint.py OUT [--dense-layers 0] [--moe-layers 1] [--experts 16] [--shard-gib 1.0]
                                    [--tokenizer]

Dense layers, then sparse ones: hidden 6144, expert width 2048, attention and indexer as published; the
vocabulary is cut to 1,024, or to the 4,096 of the bundled tokenizer if that comes along (``--tokenizer``).
One MoE layer of 24 experts makes 1.1 GiB, of which 78 % are routed experts (97 % in the published model, which
has 256 of them a layer). The weights are drawn from a pool of normally distributed values in e4m3 (codes of a
real checkpoint are distributed alike), each tensor from its own offset, so that writing is bound by the disk and
not by the random generator.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

import quantkit_kernels as kernels
from quantkit.data import bundled_model
from quantkit.safetensors_header import render_header
from quantkit.scheme import OutputTensor

HIDDEN, EXPERT_WIDTH, DENSE_WIDTH, VOCAB = 6144, 2048, 12288, 1024
TOKENIZER_VOCAB = 4096  # of the bundled models
BLOCK = 128
ATTENTION = {
    "q_a_proj": (2048, HIDDEN),
    "q_b_proj": (16384, 2048),
    "kv_a_proj_with_mqa": (576, HIDDEN),
    "kv_b_proj": (28672, 512),
    "o_proj": (HIDDEN, 16384),
}
INDEXER = {"wq_b": (4096, 2048), "wk": (128, HIDDEN)}


def mlp(prefix: str, width: int) -> dict[str, tuple[int, int]]:
    """The three projections of a gated MLP of hidden 6144."""
    return {
        f"{prefix}.gate_proj": (width, HIDDEN),
        f"{prefix}.up_proj": (width, HIDDEN),
        f"{prefix}.down_proj": (HIDDEN, width),
    }


def tensors(dense_layers: int, moe_layers: int, experts: int, vocab: int) -> Iterator[OutputTensor]:
    """All tensors of the checkpoint in the publisher's order within a layer."""
    yield OutputTensor("model.embed_tokens.weight", "BF16", (vocab, HIDDEN))
    yield OutputTensor("model.norm.weight", "BF16", (HIDDEN,))
    yield OutputTensor("lm_head.weight", "BF16", (vocab, HIDDEN))
    for layer in range(dense_layers + moe_layers):
        p = f"model.layers.{layer}"
        for name, size in (
            ("input_layernorm", HIDDEN),
            ("post_attention_layernorm", HIDDEN),
            ("self_attn.q_a_layernorm", 2048),
            ("self_attn.kv_a_layernorm", 512),
            ("self_attn.indexer.k_norm", 128),
        ):
            yield OutputTensor(f"{p}.{name}.weight", "BF16", (size,))
        yield OutputTensor(f"{p}.self_attn.indexer.k_norm.bias", "BF16", (128,))
        yield OutputTensor(f"{p}.self_attn.indexer.weights_proj.weight", "BF16", (32, HIDDEN))
        modules = {f"{p}.self_attn.{n}": s for n, s in ATTENTION.items()}
        modules |= {f"{p}.self_attn.indexer.{n}": s for n, s in INDEXER.items()}
        if layer < dense_layers:
            modules |= mlp(f"{p}.mlp", DENSE_WIDTH)
        else:
            yield OutputTensor(f"{p}.mlp.gate.weight", "BF16", (experts, HIDDEN))
            yield OutputTensor(f"{p}.mlp.gate.e_score_correction_bias", "F32", (experts,))
            modules |= mlp(f"{p}.mlp.shared_experts", EXPERT_WIDTH)
            for e in range(experts):
                modules |= mlp(f"{p}.mlp.experts.{e}", EXPERT_WIDTH)
        for module, (o, i) in modules.items():
            yield OutputTensor(f"{module}.weight", "F8_E4M3", (o, i))
            yield OutputTensor(f"{module}.weight_scale_inv", "F32", (-(-o // BLOCK), -(-i // BLOCK)))


class Values:
    """Draws the bytes of a tensor from pools made once."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        normal = self.rng.standard_normal(1 << 23, dtype=np.float32)
        self.codes = kernels.float_to_fp8((normal * 100).clip(-448, 448).reshape(-1, 2048), (1 << 23, 2048))[0]
        self.codes = np.tile(self.codes.reshape(-1), 2)
        self.bf16 = kernels.float32_to_bf16(normal * np.float32(0.02))

    def of(self, tensor: OutputTensor) -> bytes:
        count = int(np.prod(tensor.shape))
        if tensor.dtype == "F8_E4M3":
            start = int(self.rng.integers(0, 1 << 23))
            reps = -(-(start + count) // len(self.codes))
            return np.tile(self.codes, reps)[start : start + count].tobytes()
        if tensor.name.endswith("weight_scale_inv"):
            return self.rng.uniform(5e-5, 4e-4, count).astype(np.float32).tobytes()
        if tensor.dtype == "F32":
            return np.zeros(count, np.float32).tobytes()
        return np.resize(self.bf16, count).tobytes()


CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "hidden_size": HIDDEN,
    "intermediate_size": DENSE_WIDTH,
    "moe_intermediate_size": EXPERT_WIDTH,
    "kv_lora_rank": 512,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 0,
    "dtype": "bfloat16",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    },
}


def write(
    out: Path, *, moe_layers: int, experts: int, shard_bytes: int, dense_layers: int = 0, seed: int = 0,
    tokenizer: bool = False, active: int = 8,
) -> int:  # fmt: skip
    """Write the checkpoint and return the bytes of its tensors.

    Args:
        tokenizer: bring a bundled tokenizer along, so that the checkpoint can be calibrated.
        active: experts of a token.
    """
    out.mkdir(parents=True, exist_ok=True)
    layers, vocab = dense_layers + moe_layers, TOKENIZER_VOCAB if tokenizer else VOCAB
    for name in ("tokenizer.json", "tokenizer_config.json") if tokenizer else ():
        shutil.copyfile(bundled_model("tiny-glm") / name, out / name)
    config = CONFIG | {
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "first_k_dense_replace": dense_layers,
        "n_routed_experts": experts,
        "num_experts_per_tok": min(active, experts),
        "indexer_types": ["full"] * layers,
        "mlp_layer_types": ["dense"] * dense_layers + ["sparse"] * moe_layers,
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    return write_files(out, tensors(dense_layers, moe_layers, experts, vocab), Values(seed).of, shard_bytes)


def write_files(
    out: Path, tensors: Iterable[OutputTensor], content: Callable[[OutputTensor], bytes], shard_bytes: int
) -> int:
    """Write the safetensors files and their index; the bytes of the tensors."""
    shards: list[list[OutputTensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.nbytes for t in shards[-1]) + tensor.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    weight_map, total = {}, 0
    for k, shard in enumerate(shards, 1):
        name = f"model-{k:05d}-of-{len(shards):05d}.safetensors"
        with open(out / name, "wb") as f:
            f.write(render_header(shard))
            for tensor in shard:
                f.write(content(tensor))
                weight_map[tensor.name] = name
                total += tensor.nbytes
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dense-layers", type=int, default=0)
    parser.add_argument("--moe-layers", type=int, default=1)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--shard-gib", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", action="store_true", help="bring a tokenizer along, for calibration")
    a = parser.parse_args()
    total = write(
        a.out,
        dense_layers=a.dense_layers,
        moe_layers=a.moe_layers,
        experts=a.experts,
        shard_bytes=int(a.shard_gib * 2**30),
        seed=a.seed,
        tokenizer=a.tokenizer,
    )
    print(f"{total / 2**30:.2f} GiB in {a.out}")


if __name__ == "__main__":
    main()
