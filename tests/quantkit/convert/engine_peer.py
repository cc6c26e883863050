"""Converts with llm-compressor and says what it saw; run by an interpreter that has it (test_llmcompressor.py).

    python -m tests.quantkit.convert.engine_peer MODEL METHOD OUT

The last line of stdout is a JSON object; anything before it would be what the engine printed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize

import quantkit
from quantkit.artifact import verify_artifact
from quantkit.convert import llmcompressor

GROUP = 64
ARGS = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP)
SMALL = {"samples": 4, "length": 32, "layers": "2", "group_size": GROUP}


def main() -> None:
    model, method, out = sys.argv[1:]
    seen: dict[str, Any] = {"packed": {}, "changed": []}
    run, take = llmcompressor._run, llmcompressor._take

    def watched(loaded: Any, task: Any, names: frozenset[str], fallbacks: set[str]) -> None:
        before = {n: p.clone() for n, p in loaded.named_parameters() if n.rpartition(".")[0] not in names}
        run(loaded, task, names, fallbacks)
        after = dict(loaded.named_parameters())
        seen["changed"] = [n for n, p in before.items() if not torch.equal(p, after[n])]
        seen["targets"] = len(names)

    def packed_by_compressed_tensors(module: Any, key: Any, is_fallback: bool) -> Any:
        codes = quantize(module.weight, module.weight_scale, None, ARGS, dtype=torch.int8)
        scale = module.weight_scale.detach().view(torch.int16)
        seen["packed"][key] = (pack_to_int32(codes, 4).numpy().tobytes(), scale.numpy().tobytes())
        return take(module, key, is_fallback)

    llmcompressor._run, llmcompressor._take = watched, packed_by_compressed_tensors
    with quantkit.open(model) as checkpoint:
        plan = quantkit.plan(checkpoint, engine="llmcompressor", method=method, **SMALL)
        artifact = quantkit.convert(plan, Path(out), checkpoint=checkpoint)
    differ = []
    for (layer, expert, projection), (packed, scale) in seen.pop("packed").items():
        module = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"
        stored = artifact.decode.tensors
        found = (stored.read(f"{module}.weight_packed").tobytes(), stored.read(f"{module}.weight_scale").tobytes())
        if found != (packed, scale):
            differ.append(module)
    # Some layers only are beyond the loaders (docs/limits.md), which verify says.
    problems = [c.name for c in verify_artifact(out).checks if c.ok is False and not c.name.startswith("engines")]
    errors = [r.decode.relative_error for r in artifact.records() if r.decode.action == "quantize"]
    print(json.dumps({
        **seen, "differ": differ, "engine": artifact.manifest.engine, "problems": problems,
        "worst": max(e for e in errors if e is not None),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
