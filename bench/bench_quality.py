"""What `mse` and `gptq` buy over `rtn`: weight error, perplexity and mean KL divergence for every group size.

    python bench/bench_quality.py [--models tiny-glm,tiny-qwen3] [--tokens N] [--json FILE]

Each combination is converted as a user would, and its decode view compared with the prefill view (FP8) by
transformers in float32 arithmetic, so that only the weights differ, on all of the bundled held-out text (about
100,000 tokens). Differences of perplexity are paired by block; one within two standard errors is reported as
undecided (no verdict) rather than as a win. The text cannot resolve less: that row carries its standard error.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import quantkit
from measure import Row, write_rows
from quantkit.artifact import Artifact
from quantkit.data import MODELS
from quantkit.scheme import GROUP_SIZES
from quantkit_evals.dequantized import write_bf16_copy
from quantkit_evals.fidelity import Fidelity, fidelity
from quantkit_evals.models import load_model, quiet
from quantkit_evals.statistics import Mean
from quantkit_evals.text import BLOCK_TOKENS, token_blocks

METHODS = ("rtn", "mse", "gptq")
GPTQ_TARGET = 0.58  # of rtn's KL divergence; llm-compressor's GPTQ reaches 0.65 on tiny-glm
DECIDED = 2.0  # standard errors


def weight_error(artifact: Artifact) -> float:
    """Relative root mean square error of all INT4 weights, folds undone, against the FP8 ones they come from."""
    error = energy = 0.0
    for module, weight in artifact.decode.tensors.weights().items():
        if weight.weight.name.endswith(".weight_packed"):
            exact = artifact.prefill[module].dequantize().astype(np.float64)
            error += float(np.square(artifact.decode[module].unfolded() - exact).sum())
            energy += float(np.square(exact).sum())
    return math.sqrt(error / energy)


def measure(model: str, num_blocks: int | None, scratch: Path) -> tuple[dict[str, float], dict[str, Fidelity]]:
    """Weight error and fidelity for each ``METHOD-gSIZE`` of a bundled model."""
    errors: dict[str, float] = {}
    candidates: dict[str, Any] = {}
    reference = None
    for group_size in GROUP_SIZES:
        for method in METHODS:
            key = f"{method}-g{group_size}"
            with quantkit.open(model) as source:
                plan = quantkit.plan(source, group_size=group_size, method=method)
                artifact = quantkit.convert(plan, scratch / f"{model}-{key}", checkpoint=source)
            with artifact:
                errors[key] = weight_error(artifact)
                if reference is None:
                    reference = load_model(
                        write_bf16_copy(artifact.prefill.path, scratch / model), dtype="float32"
                    )
                copy = write_bf16_copy(artifact.decode.path, scratch / f"{model}-{key}-bf16")
                candidates[key] = load_model(copy, dtype="float32")
    blocks = token_blocks(scratch / model, num_blocks=num_blocks)
    with quiet():
        return errors, fidelity(reference, candidates, blocks)


def verdict(difference: Mean) -> bool | None:
    """Whether a difference is below zero; None when it is within two standard errors of it."""
    if abs(difference.value) <= DECIDED * difference.stderr:
        return None
    return difference.value < 0


def rows_of(model: str, errors: dict[str, float], results: dict[str, Fidelity]) -> list[Row]:
    reference = results["mse-g32"].reference
    rows = [Row(f"{model} FP8 perplexity", reference.value, "")]
    for group_size in GROUP_SIZES:
        name, a, b = f"{model} g{group_size}", f"rtn-g{group_size}", f"mse-g{group_size}"
        rtn, mse = results[a], results[b]
        nll = mse.perplexity.difference(rtn.perplexity)
        rows += [
            Row(f"{name} weight error, mse", errors[b], "relative", "rtn", errors[a], "< rtn",
                errors[b] < errors[a]),
            Row(f"{name} mean KL to FP8, mse", mse.kl.value, "nats", "rtn", rtn.kl.value, "< rtn",
                verdict(mse.kl_difference(rtn))),
            Row(f"{name} perplexity, mse", mse.perplexity.value, "", "rtn", rtn.perplexity.value, "< rtn",
                verdict(nll)),
            Row(f"{name} nll, mse minus rtn", nll.value, "nats"),
            Row(f"{name} nll, mse minus rtn, standard error", nll.stderr, "nats"),
            Row(f"{name} nll, mse minus FP8", mse.nll_difference.value, "nats", "rtn", rtn.nll_difference.value),
            Row(f"{name} same top token as FP8, mse", mse.agreement.value, "share", "rtn", rtn.agreement.value),
            *gptq_rows(name, results[f"gptq-g{group_size}"], rtn),
        ]  # fmt: skip
    return rows


def gptq_rows(name: str, gptq: Fidelity, rtn: Fidelity) -> list[Row]:
    share = gptq.kl.value / rtn.kl.value
    nll = gptq.perplexity.difference(rtn.perplexity)
    return [
        Row(f"{name} mean KL to FP8, gptq", gptq.kl.value, "nats", "rtn", rtn.kl.value),
        Row(f"{name} mean KL to FP8, gptq, standard error", gptq.kl.stderr, "nats", "rtn", rtn.kl.stderr),
        Row(f"{name} KL, gptq over rtn", share, "x", target=f"<= {GPTQ_TARGET}", holds=share <= GPTQ_TARGET),
        Row(f"{name} perplexity, gptq", gptq.perplexity.value, "", "rtn", rtn.perplexity.value),
        Row(f"{name} nll, gptq minus rtn", nll.value, "nats"),
        Row(f"{name} nll, gptq minus rtn, standard error", nll.stderr, "nats"),
        Row(f"{name} same top token as FP8, gptq", gptq.agreement.value, "share", "rtn", rtn.agreement.value),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", type=int, help="held-out tokens (default: all)")
    parser.add_argument("--json")
    args = parser.parse_args()
    num_blocks = None if args.tokens is None else args.tokens // BLOCK_TOKENS
    rows: list[Row] = []
    for model in args.models.split(","):
        with tempfile.TemporaryDirectory(prefix="quantkit-bench-") as scratch:
            rows += rows_of(model, *measure(model, num_blocks, Path(scratch)))
    write_rows(rows, args.json)


if __name__ == "__main__":
    main()
