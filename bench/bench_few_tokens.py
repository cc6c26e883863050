"""GPTQ against rounding when calibration tokens are few: a real expert sees fewer than it has columns.

    python bench/bench_few_tokens.py [--models tiny-glm,tiny-qwen3] [--methods rtn,gptq] [--tokens N] [--json FILE]

An expert of the bundled models has 256 columns and sees a quarter of all tokens; with calibration sets of several
sizes that is a fifth as many tokens as columns up to sixteen times as many. Everything else is as in
bench_engines.py, whose peers can be named in ``--methods`` too. A method that ends above rtn is worse than none.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import quantkit
from bench_engines import BASE, PEERS, Setting, measure
from measure import Row, write_rows
from quantkit.data import MODELS
from quantkit_evals.text import BLOCK_TOKENS

TOKENS_PER_EXPERT = (48, 128, 512, 4096)
LENGTH = 128
GROUP_SIZE = 32
TARGET = 1.0  # of rtn's KL divergence: no calibration may do harm


def share_of_experts(model: str) -> float:
    """Of all tokens, the share that an expert sees on average."""
    with quantkit.open(model) as source:
        config = source.config
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    experts = next(config[name] for name in names if config.get(name))
    return float(config["num_experts_per_tok"]) / float(experts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--methods", default="rtn,gptq")
    parser.add_argument("--tokens", type=int, default=12288, help="held-out tokens")
    parser.add_argument("--json")
    args = parser.parse_args()
    methods = args.methods.split(",")
    rows: list[Row] = []
    for model in args.models.split(","):
        for tokens in TOKENS_PER_EXPERT:
            samples = max(1, round(tokens / share_of_experts(model) / LENGTH))
            with tempfile.TemporaryDirectory(prefix="quantkit-bench-") as scratch:
                found, _ = measure(
                    Setting(model, GROUP_SIZE, samples, LENGTH),
                    methods,
                    args.tokens // BLOCK_TOKENS,
                    Path(scratch),
                )
            for name in (name for name in found if name != BASE):
                share = found[name].kl.value / found[BASE].kl.value
                at = f"{model} g{GROUP_SIZE} KL over rtn's, {tokens} tokens per expert, {name}"
                verdict = () if name in PEERS else (f"<= {TARGET}", share <= TARGET)
                rows.append(Row(at, share, "x", None, None, *verdict))
                paired = found[name].kl_difference(found[BASE])
                rows.append(Row(f"{at}, standard error", paired.stderr / found[BASE].kl.value, "x"))
    write_rows(rows, args.json)


if __name__ == "__main__":
    main()
