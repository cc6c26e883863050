"""quantkit's methods against llm-compressor's GPTQ and AutoRound: KL divergence and perplexity on held-out text.

    python bench/bench_engines.py [--models tiny-glm,tiny-qwen3] [--group-sizes 32,128] [--methods ...]
        [--samples N] [--length N] [--tokens N] [--json FILE]

Every candidate is an artifact that `quantkit convert` made: ours with the default engine, the others with
`--engine llmcompressor` in the peers' environment (peer_env.py), so that all have the same plan, calibration token
ids and INT4 layout and only the codes and scales differ. The peers run at their defaults: every expert sees all
tokens, AutoRound takes 200 iterations (minutes per model and group size). All are judged as BF16 copies of the
decode view in float32 arithmetic against that of the FP8 view, on the same blocks of the bundled held-out text.

A method that this version of quantkit does not have yet is left out, with a line on stderr.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quantkit
from measure import Row, write_rows
from peer_env import ROOT, peer_python
from quantkit.artifact import Artifact
from quantkit.data import MODELS
from quantkit_evals.dequantized import write_bf16_copy
from quantkit_evals.fidelity import Fidelity, fidelity
from quantkit_evals.models import load_model, quiet
from quantkit_evals.text import BLOCK_TOKENS, token_blocks

BASE = "rtn"
OURS = ("gptq", "awq", "gptq+awq")
PEERS = {"llm-compressor GPTQ": "gptq", "AutoRound": "autoround"}
PEER = "llm-compressor GPTQ"
PEER_TARGET = 0.9  # our best KL divergence over llm-compressor's GPTQ
BASE_TARGET = 0.58  # and over rtn's


@dataclass(frozen=True)
class Setting:
    """What the conversions of one comparison share."""

    model: str
    group_size: int
    samples: int
    length: int


def convert(setting: Setting, method: str, out: Path) -> None:
    """With our own engine, in this process."""
    options: dict[str, Any] = {"samples": setting.samples, "length": setting.length} if method != BASE else {}
    with quantkit.open(setting.model) as source:
        plan = quantkit.plan(source, group_size=setting.group_size, method=method, **options)
        quantkit.convert(plan, out, checkpoint=source).close()


def convert_by_peer(setting: Setting, method: str, out: Path) -> None:
    """With llm-compressor, by the command line and in its environment."""
    path = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "recipes", "serve", "evals"))
    subprocess.run(
        [
            peer_python(), "-m", "quantkit", "convert", setting.model, "--engine", "llmcompressor",
            "--method", method, "--group-size", str(setting.group_size), "--samples", str(setting.samples),
            "--length", str(setting.length), "--quiet", "-o", str(out),
        ],
        check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def available(setting: Setting, methods: list[str]) -> list[str]:
    """Those of ``methods`` that quantkit's own engine has in this version."""
    found = []
    for method in methods:
        try:
            with quantkit.open(setting.model) as source:
                quantkit.plan(source, method=method)
        except quantkit.errors.RecipeError as problem:
            print(f"left out: {method}: {problem}", file=sys.stderr)
        else:
            found.append(method)
    return found


def measure(
    setting: Setting, methods: list[str], num_blocks: int | None, scratch: Path
) -> tuple[dict[str, Fidelity], dict[str, float]]:
    """Fidelity of each method by its name, and the seconds that its conversion took."""
    seconds: dict[str, float] = {}
    candidates: dict[str, Any] = {}
    reference = None
    for name in methods:
        out = scratch / name.replace(" ", "-")
        start = time.perf_counter()
        if name in PEERS:
            convert_by_peer(setting, PEERS[name], out)
        else:
            convert(setting, name, out)
        seconds[name] = time.perf_counter() - start
        with Artifact.open(out) as artifact:
            if reference is None:
                reference = load_model(write_bf16_copy(artifact.prefill.path, scratch / "fp8"), dtype="float32")
            copy = write_bf16_copy(artifact.decode.path, out.with_name(f"{out.name}-bf16"))
            candidates[name] = load_model(copy, dtype="float32")
    blocks = token_blocks(scratch / "fp8", num_blocks=num_blocks)
    with quiet():
        return fidelity(reference, candidates, blocks), seconds


def rows_of(setting: Setting, results: dict[str, Fidelity], seconds: dict[str, float]) -> list[Row]:
    at = f"{setting.model} g{setting.group_size}"
    peer = results.get(PEER)
    rows: list[Row] = []
    for name, found in results.items():
        of_peer = (PEER, peer.kl.value) if peer and name not in PEERS else (None, None)
        change = found.nll_difference
        growth = math.exp(change.value)
        rows += [
            Row(f"{at} mean KL to FP8, {name}", found.kl.value, "nats", *of_peer),
            Row(f"{at} mean KL to FP8, {name}, standard error", found.kl.stderr, "nats"),
            Row(f"{at} perplexity change, {name}", 100 * (growth - 1), "%"),
            Row(f"{at} perplexity change, {name}, standard error", 100 * growth * change.stderr, "%"),
            Row(f"{at} conversion, {name}", seconds[name], "s"),
        ]
    return rows + shares(at, results)


def shares(at: str, results: dict[str, Fidelity]) -> list[Row]:
    """Our best method over each of the others; the targets are for llm-compressor's GPTQ and for rtn."""
    ours = [name for name in results if name in OURS]
    if not ours:
        return []
    best = min(ours, key=lambda name: results[name].kl.value)
    rows = []
    for other, target in ((PEER, PEER_TARGET), (BASE, BASE_TARGET), ("AutoRound", None)):
        if other not in results:
            continue
        share = results[best].kl.value / results[other].kl.value
        verdict = () if target is None else (f"<= {target}", share <= target)
        rows.append(Row(f"{at} KL, {best} over {other}", share, "x", None, None, *verdict))
        paired = results[best].kl_difference(results[other])
        rows.append(Row(f"{at} KL, {best} minus {other}", paired.value, "nats"))
        rows.append(Row(f"{at} KL, {best} minus {other}, standard error", paired.stderr, "nats"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--group-sizes", default="32,128")
    parser.add_argument("--methods", default=",".join((BASE, *OURS, *PEERS)))
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--tokens", type=int, help="held-out tokens (default: all)")
    parser.add_argument("--json")
    args = parser.parse_args()
    num_blocks = None if args.tokens is None else args.tokens // BLOCK_TOKENS
    rows: list[Row] = []
    for model in args.models.split(","):
        for group_size in map(int, args.group_sizes.split(",")):
            setting = Setting(model, group_size, args.samples, args.length)
            wanted = args.methods.split(",")
            own = available(setting, [m for m in wanted if m not in PEERS])
            with tempfile.TemporaryDirectory(prefix="quantkit-bench-") as scratch:
                methods = [*own, *(m for m in wanted if m in PEERS)]
                rows += rows_of(setting, *measure(setting, methods, num_blocks, Path(scratch)))
    write_rows(rows, args.json)


if __name__ == "__main__":
    main()
