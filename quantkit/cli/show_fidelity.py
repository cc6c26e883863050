"""How the figures of ``quantkit fidelity`` are laid out for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .console import Block, Table

_ROWS = (
    ("nll minus FP8's, nats per token", "nll_difference", 1, "+.3g"),
    ("KL divergence, mean", "kl_mean", 1, ".3g"),
    ("KL divergence, median", "kl_median", 1, ".3g"),
    ("KL divergence, 99 %", "kl_99", 1, ".3g"),
    ("same top token, %", "top1_agreement", 100, ".2f"),
    ("right with FP8, wrong here, %", "flips_lost", 100, ".2f"),
    ("wrong with FP8, right here, %", "flips_gained", 100, ".2f"),
)


def fidelity(found: Mapping[str, Any]) -> Iterator[Block]:
    """``quantkit fidelity`` from its JSON document."""
    text = found["text"]
    yield f"artifact   {found['artifact']}"
    yield f"pair       {found['pair_id']}"
    yield f"text       {text['name']} ({text['sha256'][:16]}), {found['dtype']} arithmetic"
    names = {"prefill": "FP8 (prefill view)", "decode": "INT4 (decode view)"}
    rows = [[label, _figure(found["perplexity"][view], 1, ".4f")] for view, label in names.items()]
    yield Table("Perplexity", ("", ">perplexity"), rows)
    columns = ("", ">INT4", ">noise floor")
    yield Table(
        "Against FP8", columns,
        [[label, *(_figure(found[side][key], factor, form) for side in ("decode", "noise_floor"))]
         for label, key, factor, form in _ROWS],
    )  # fmt: skip
    yield ""
    yield (
        f"± is one standard error over {found['blocks']:,} blocks of {found['block_tokens']} tokens; KL in nats "
        "per token."
    )
    yield "The noise floor is FP8 against itself, run one block at a time: rounding of the arithmetic alone."


def _figure(figure: Mapping[str, float | None], factor: int, form: str) -> str:
    value, stderr = figure["value"], figure["stderr"]
    shown = "" if value is None else format(factor * value, form)
    return (
        shown if stderr is None else f"{shown} ± {format(factor * stderr, form.lstrip('+').replace('3g', '2g'))}"
    )
