"""What tests of latent attention share: transformers' attention of one layer, and ours on the same weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV32Config, GlmMoeDsaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention, DeepseekV32RotaryEmbedding
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention, GlmMoeDsaRotaryEmbedding

from quantkit_kernels.forward.checked_table import ChosenPositions
from quantkit_serve.config import CacheConfig, ModelConfig
from quantkit_serve.model.attention import StepContext
from quantkit_serve.model.kernel_ops import KernelOps
from quantkit_serve.model.mla import LatentAttention
from quantkit_serve.model.ops import Ops
from quantkit_serve.model.pages import pools, whole_page_bytes
from quantkit_serve.model.reference_ops import ReferenceOps
from quantkit_serve.model.rope import rope_of
from quantkit_serve.model.weights import Dual, Linear, PlainWeight
from quantkit_serve.phase import Phase

PAGE = 8
_CLASSES = {
    "deepseek_v3": (DeepseekV3Config, DeepseekV3Attention, DeepseekV3RotaryEmbedding),
    "deepseek_v32": (DeepseekV32Config, DeepseekV32Attention, DeepseekV32RotaryEmbedding),
    "glm_moe_dsa": (GlmMoeDsaConfig, GlmMoeDsaAttention, GlmMoeDsaRotaryEmbedding),
}


class Theirs:
    """transformers' attention of a few layers, float32, random weights of which bfloat16 has the numbers."""

    def __init__(self, text: Mapping[str, Any], layers: int = 1, seed: int = 0) -> None:
        config_class, attention, rotary = _CLASSES[text["model_type"]]
        self.config = config_class.from_dict({**text, "attn_implementation": "eager"})
        self.config._attn_implementation = "eager"
        self.layers = [attention(self.config, layer).eval() for layer in range(layers)]
        self._rotary = rotary(self.config)
        generator = torch.Generator().manual_seed(seed)
        for parameter in nn.ModuleList(self.layers).parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.3
            if parameter.dim() == 2:
                values = values * 3 * parameter.shape[1] ** -0.5
            elif parameter.mean() == 1:
                values = values + 1
            parameter.data = values.bfloat16().float()

    @torch.inference_mode()
    def __call__(self, hidden: Tensor) -> list[Tensor]:
        """Output of each layer, all on the same ``[T, H]``; layers that share a choice get it."""
        tokens = len(hidden)
        hidden = hidden[None]
        mask = torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]
        angles = self._rotary(hidden, torch.arange(tokens)[None])
        outputs, chosen = [], None
        for layer in self.layers:
            further = {"prev_topk_indices": chosen} if isinstance(layer, GlmMoeDsaAttention) else {}
            found = layer(hidden, position_embeddings=angles, attention_mask=mask, position_ids=None, **further)
            outputs.append(found[0][0])
            chosen = found[2] if len(found) > 2 else None
        return outputs


class ModuleWeights:
    """``Weights`` of a module of transformers."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, decode: nn.Module | None = None) -> None:
        self._module, self._dtype, self._decode = module, dtype, decode

    def linear(self, name: str) -> Dual[Linear]:
        prefill = self._linear(self._module, name)
        return Dual(prefill, prefill if self._decode is None else self._linear(self._decode, name))

    def _linear(self, module: nn.Module, name: str) -> Linear:
        found = module.get_submodule(name)
        assert isinstance(found, nn.Linear)
        bias = None if found.bias is None else found.bias.data.to(self._dtype)
        return Linear(PlainWeight(found.weight.data.to(self._dtype)), bias)

    def tensor(self, name: str) -> Tensor:
        return self._module.get_parameter(name).data.to(self._dtype)

    def has(self, name: str) -> bool:
        return name in dict(self._module.named_parameters())

    def below(self, name: str) -> ModuleWeights:
        decode = None if self._decode is None else self._decode.get_submodule(name)
        return ModuleWeights(self._module.get_submodule(name), self._dtype, decode)


@dataclass
class Request:
    """A request: its hidden states, and how many of them were computed."""

    hidden: Tensor
    pages: Sequence[int]
    done: int = 0
    outputs: list[list[Tensor]] = field(default_factory=list)


class Ours:
    """Our attention of the same layers over one pool of pages."""

    def __init__(
        self,
        theirs: Theirs,
        text: Mapping[str, Any],
        ops: Ops,
        num_pages: int = 64,
        weights: Sequence[ModuleWeights] | None = None,
    ) -> None:
        weights = weights or [ModuleWeights(layer, ops.dtype) for layer in theirs.layers]
        self.layers = [LatentAttention(text, own, layer, ops) for layer, own in enumerate(weights)]
        self._chosen: list[list[Tensor | None]] = [[] for _ in self.layers]
        self._rope = rope_of(text, text["qk_rope_head_dim"])
        self._dtype = ops.dtype
        layouts = [[ops.layout(kind) for kind in layer.kinds] for layer in self.layers]
        self._pools = pools(layouts, torch.zeros((num_pages, whole_page_bytes(layouts)), dtype=torch.uint8))

    def run(self, parts: Sequence[tuple[Request, int]], phase: Phase = Phase.PREFILL) -> None:
        """One step: the next ``count`` tokens of each sequence; outputs are kept with them."""
        hidden = torch.cat([s.hidden[s.done : s.done + count] for s, count in parts]).to(self._dtype)
        step = self._step(parts, phase)
        outputs = []
        for number, (layer, own) in enumerate(zip(self.layers, self._pools, strict=True)):
            outputs.append(layer.forward(hidden, step, own))
            topk = step.topk
            self._chosen[number].append(topk.positions if isinstance(topk, ChosenPositions) else topk)
        for row, (sequence, count) in enumerate(parts):
            first = int(step.cu_tokens[row])
            sequence.outputs.append([out[first : first + count].float() for out in outputs])
            sequence.done += count

    def chosen(self, layer: int) -> list[set[int]]:
        """Positions to which a layer attended, by token, over all steps so far."""
        rows = [row for topk in self._chosen[layer] if topk is not None for row in topk.tolist()]
        return [{position for position in row if position >= 0} for row in rows]

    def _step(self, parts: Sequence[tuple[Request, int]], phase: Phase) -> StepContext:
        counts = [count for _, count in parts]
        positions = torch.cat([torch.arange(s.done, s.done + count) for s, count in parts])
        table = torch.full((len(parts), max(len(s.pages) for s, _ in parts)), -1, dtype=torch.int32)
        for row, (sequence, _) in enumerate(parts):
            table[row, : len(sequence.pages)] = torch.tensor(sequence.pages)
        rows = torch.arange(len(parts), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
        return StepContext(
            phase=phase,
            positions=positions,
            cu_tokens=torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32),
            lengths=torch.tensor([s.done + count for s, count in parts], dtype=torch.int32),
            block_table=table,
            slots=table[rows.long(), positions // PAGE].long() * PAGE + positions % PAGE,
            rows=rows,
            visible=(positions + 1).int(),
            is_single=set(counts) == {1},
            angles=self._rope.angles(positions),
            longest=int(positions.max()) + 1,
        )


def outputs(sequence: Request) -> list[Tensor]:
    """Of each layer, all tokens."""
    return [torch.cat(parts) for parts in zip(*sequence.outputs, strict=True)]


def hidden_states(tokens: int, columns: int, seed: int = 0) -> Tensor:
    """float32 ``[tokens, columns]`` of which bfloat16 has the numbers."""
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def reference_ops(**settings: Any) -> ReferenceOps:
    model = ModelConfig(compute="float32", weights="fp8", **settings)
    return ReferenceOps(model, CacheConfig(kv_dtype="f32", page_size=PAGE))


def kernel_ops(kv_dtype: Any = "fp8", **settings: Any) -> KernelOps:
    return KernelOps(ModelConfig(**settings), CacheConfig(kv_dtype=kv_dtype, page_size=PAGE))
