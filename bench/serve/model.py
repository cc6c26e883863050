"""Models to serve: random weights in the proportions of published ones, as FP8 checkpoints, converted with rtn.

    python bench/serve/model.py [--size mid|small] [--models DIR] [--json FILE.json] [NAME ...]

``glm`` has the layers of GLM-5.2 with a third of its hidden size, expert width and latent of the query, a quarter
of its heads, and what doesn't scale as published: latent 512, rotary 64, index keys 128, eight experts of a token,
a shared one, an indexer on every fourth layer. Of a token's weight bytes 60 % are routed experts (59 % in the
published model); its three dense layers of 78 are left out. ``glm-all`` is the same source with all linears INT4.
``qwen`` has the layers of Qwen3-30B-A3B, six of 48, with 48 experts of 128. Vocabulary and tokenizer are the
bundled ones. ``small`` is for trying the scripts. Weights are scaled so that every product keeps the size of its
input: activations stay finite and the router spreads tokens over all experts.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from options import Options, script

import quantkit
import quantkit_kernels as kernels
from make_checkpoint import BLOCK, TOKENIZER_VOCAB, Values, write_files
from measure import Row
from quantkit.api.planning import plan_document
from quantkit.artifact.bf16_copy import write_bf16_copy
from quantkit.data import bundled_model
from quantkit.scheme import OutputTensor

NAMES = ("glm", "glm-all", "qwen", "tiny-glm")
INT4_FOR_PEERS = "qwen-bf16-rest"  # INT4 experts for engines without FP8 block kernels
SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
SHARD_BYTES = 1 << 30
CODE_STD = 100.0  # of ``Values.codes``
LOGIT_STD = 3.0


@dataclass(frozen=True)
class Sizes:
    """Of a model; ``index_heads`` and ``query_latent`` only of ``glm``, ``kv_heads`` only of ``qwen``."""

    layers: int
    hidden: int
    expert_width: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    query_latent: int
    index_heads: int


SIZES = {
    ("glm", "mid"): Sizes(8, 2048, 768, 48, 8, 16, 16, 768, 8),
    ("glm", "small"): Sizes(2, 256, 128, 16, 8, 4, 4, 128, 4),
    ("qwen", "mid"): Sizes(6, 2048, 768, 48, 8, 32, 4, 0, 0),
    ("qwen", "small"): Sizes(2, 256, 128, 16, 8, 4, 2, 0, 0),
}
LATENT, ROPE, NOPE, VALUE, INDEX_DIM, HEAD_DIM = 512, 64, 192, 256, 128, 128


def glm_layer(s: Sizes, layer: int) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, ...]]]:
    """Shapes of the FP8 linears and of the BF16 tensors of a layer."""
    linears = {
        "self_attn.q_a_proj": (s.query_latent, s.hidden),
        "self_attn.q_b_proj": (s.heads * (NOPE + ROPE), s.query_latent),
        "self_attn.kv_a_proj_with_mqa": (LATENT + ROPE, s.hidden),
        "self_attn.kv_b_proj": (s.heads * (NOPE + VALUE), LATENT),
        "self_attn.o_proj": (s.hidden, s.heads * VALUE),
        **swiglu("mlp.shared_experts", s),
    }
    plain: dict[str, tuple[int, ...]] = {
        "self_attn.q_a_layernorm.weight": (s.query_latent,),
        "self_attn.kv_a_layernorm.weight": (LATENT,),
    }
    if layer % 4 == 0:
        linears["self_attn.indexer.wq_b"] = (s.index_heads * INDEX_DIM, s.query_latent)
        linears["self_attn.indexer.wk"] = (INDEX_DIM, s.hidden)
        plain["self_attn.indexer.k_norm.weight"] = plain["self_attn.indexer.k_norm.bias"] = (INDEX_DIM,)
        plain["self_attn.indexer.weights_proj.weight"] = (s.index_heads, s.hidden)
    return linears, plain


def qwen_layer(s: Sizes, layer: int) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, ...]]]:
    """The same of ``qwen``."""
    linears = {
        "self_attn.q_proj": (s.heads * HEAD_DIM, s.hidden),
        "self_attn.k_proj": (s.kv_heads * HEAD_DIM, s.hidden),
        "self_attn.v_proj": (s.kv_heads * HEAD_DIM, s.hidden),
        "self_attn.o_proj": (s.hidden, s.heads * HEAD_DIM),
    }
    return linears, {"self_attn.q_norm.weight": (HEAD_DIM,), "self_attn.k_norm.weight": (HEAD_DIM,)}


def swiglu(prefix: str, s: Sizes) -> dict[str, tuple[int, int]]:
    return {
        f"{prefix}.gate_proj": (s.expert_width, s.hidden),
        f"{prefix}.up_proj": (s.expert_width, s.hidden),
        f"{prefix}.down_proj": (s.hidden, s.expert_width),
    }


def tensors(family: str, s: Sizes) -> Iterator[OutputTensor]:
    """All of a model."""
    for name in ("model.embed_tokens", "lm_head"):
        yield OutputTensor(f"{name}.weight", "BF16", (TOKENIZER_VOCAB, s.hidden))
    yield OutputTensor("model.norm.weight", "BF16", (s.hidden,))
    for layer in range(s.layers):
        p = f"model.layers.{layer}"
        linears, plain = (glm_layer if family == "glm" else qwen_layer)(s, layer)
        plain |= {
            "input_layernorm.weight": (s.hidden,), "post_attention_layernorm.weight": (s.hidden,),
            "mlp.gate.weight": (s.experts, s.hidden),
        }  # fmt: skip
        for expert in range(s.experts):
            linears |= swiglu(f"mlp.experts.{expert}", s)
        for name, shape in plain.items():
            yield OutputTensor(f"{p}.{name}", "BF16", shape)
        if family == "glm":
            yield OutputTensor(f"{p}.mlp.gate.e_score_correction_bias", "F32", (s.experts,))
        for name, (o, i) in linears.items():
            yield OutputTensor(f"{p}.{name}.weight", "F8_E4M3", (o, i))
            yield OutputTensor(f"{p}.{name}.weight_scale_inv", "F32", (-(-o // BLOCK), -(-i // BLOCK)))


class Scaled(Values):
    """Outputs of linears are as large as their inputs, norms do nothing, logits have a spread of ``LOGIT_STD``."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._inputs = 0  # of the linear whose scale comes next

    def of(self, tensor: OutputTensor) -> bytes:
        count = math.prod(tensor.shape)
        if tensor.dtype == "F8_E4M3":
            self._inputs = tensor.shape[1]
            return super().of(tensor)
        if tensor.name.endswith("weight_scale_inv"):
            scales = self.rng.uniform(0.5, 1.5, count) / (CODE_STD * math.sqrt(self._inputs))
            return scales.astype(np.float32).tobytes()
        if tensor.dtype == "F32" or tensor.name.endswith("bias"):
            return np.zeros(count, np.float32 if tensor.dtype == "F32" else np.uint16).tobytes()
        if "norm" in tensor.name:
            return kernels.float32_to_bf16(np.ones(count, np.float32)).tobytes()
        std = {"model.embed_tokens.weight": 1.0, "lm_head.weight": LOGIT_STD / math.sqrt(tensor.shape[-1])}
        values = self.rng.standard_normal(count, dtype=np.float32)
        values *= np.float32(std.get(tensor.name, 1 / math.sqrt(tensor.shape[-1])))
        return kernels.float32_to_bf16(values).tobytes()


def config(family: str, s: Sizes) -> dict[str, Any]:
    """config.json."""
    common = {
        "vocab_size": TOKENIZER_VOCAB, "hidden_size": s.hidden, "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads, "moe_intermediate_size": s.expert_width,
        "num_experts_per_tok": s.top_k, "intermediate_size": 2 * s.hidden, "max_position_embeddings": 32768,
        "norm_topk_prob": True, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
        "dtype": "bfloat16", "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        },
    }  # fmt: skip
    if family == "qwen":
        return common | {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": s.experts,
            "head_dim": HEAD_DIM, "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6,
            "rope_theta": 1e6, "use_sliding_window": False, "sliding_window": None,
        }  # fmt: skip
    return common | {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "n_routed_experts": s.experts,
        "n_shared_experts": 1, "first_k_dense_replace": 0, "mlp_layer_types": ["sparse"] * s.layers,
        "kv_lora_rank": LATENT, "q_lora_rank": s.query_latent, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE,
        "qk_head_dim": NOPE + ROPE, "v_head_dim": VALUE, "head_dim": NOPE, "index_head_dim": INDEX_DIM,
        "index_n_heads": s.index_heads, "index_topk": 2048, "num_nextn_predict_layers": 0,
        "indexer_types": ["full" if layer % 4 == 0 else "shared" for layer in range(s.layers)],
        "layer_types": ["deepseek_sparse_attention"] * s.layers, "rms_norm_eps": 1e-5, "rope_interleave": True,
        "rope_parameters": {"rope_theta": 8e6, "rope_type": "default"}, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    }  # fmt: skip


def source(name: str, options: Options) -> Path:
    """The FP8 checkpoint, written if it isn't there."""
    family = name.removesuffix("-all").removesuffix("-bf16-rest")
    if family == "tiny-glm":
        return bundled_model(family)
    out = options.models / options.size / family
    done = out / ".done"
    if not done.exists():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        sizes = SIZES[family, options.size]
        for file in SIDE_FILES:
            shutil.copyfile(bundled_model("tiny-glm") / file, out / file)
        (out / "config.json").write_text(json.dumps(config(family, sizes), indent=1))
        write_files(out, tensors(family, sizes), Scaled(0).of, SHARD_BYTES)
        done.touch()
    return out


def plan(name: str, options: Options) -> Any:
    """What is converted: round to nearest, groups of 32."""
    linears = "all" if name.endswith("-all") else "routed"
    rest = "bf16" if name.endswith("-bf16-rest") else "fp8"
    return quantkit.plan(str(source(name, options)), method="rtn", linears=linears, rest=rest, place="link")


def decode_reads(name: str, options: Options) -> dict[str, Any]:
    """Weight bytes of a decoded token in both views and the bound of the speed-up, as ``quantkit plan`` says."""
    with quantkit.open(str(source(name, options))) as checkpoint:
        found: dict[str, Any] = plan_document(plan(name, options), checkpoint)["decode_reads"]
    return found


def artifact(name: str, options: Options) -> Path:
    """The artifact, converted if it isn't there."""
    out = options.models / options.size / f"{name}-w4"
    if not (out / "manifest.json").exists():
        shutil.rmtree(out, ignore_errors=True)
        quantkit.convert(plan(name, options), out).close()
    return out


def decode_view(name: str, options: Options) -> Path:
    """The INT4 checkpoint of an artifact, as engines load it."""
    return artifact(name, options) / "decode"


def bf16(name: str, options: Options) -> Path:
    """The same weights as a BF16 checkpoint, for peers; of the FP8 source."""
    out = options.models / options.size / f"{name}-bf16"
    done = out / ".done"
    if not done.exists():
        shutil.rmtree(out, ignore_errors=True)
        with quantkit.open(str(source(name, options))) as checkpoint:
            write_bf16_copy(checkpoint, out)
        done.touch()
    return out


def rows(options: Options) -> list[Row]:
    found = []
    for name in options.names or NAMES:
        start = time.perf_counter()
        made = artifact(name, options)
        seconds = time.perf_counter() - start
        size = sum(file.stat().st_size for file in made.rglob("*.safetensors"))
        found.append(Row(f"{name}, both views", size / 2**30, "GiB"))
        if seconds > 0.1:  # it wasn't there
            found.append(Row("  written and converted in", seconds, "s"))
    return found


if __name__ == "__main__":
    script(rows, __doc__, names=NAMES)
