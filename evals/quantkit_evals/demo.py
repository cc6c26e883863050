"""``make demo``: convert the bundled model, verify the artifact, load both views with transformers, compare them.

    python -m quantkit_evals.demo [--out demo-out] [--model tiny-glm] [--tokens 8192] [--samples N]

Conversion (calibrated, which takes most of the time) and verification are the commands a user would type. The
figures are made with transformers:

    FP8         prefill view as a BF16 copy made by our dequantizer (transformers' own is wrong on partial blocks)
    INT4        decode view as such a copy: the same BF16 arithmetic, so only the weights differ
    INT4 as run decode view as it lies on disk, by transformers with compressed-tensors: INT4 experts decompressed,
                FP8 linears with activations quantized at run time, as an engine would; loading in BF16,
                transformers 5.17 also rounds the float32 block scales to BF16, which engines do not

Running it again finds the artifact complete and only measures.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.data import MODELS
from quantkit.errors import QuantkitError, UsageError

from .text import BLOCK_TOKENS

if TYPE_CHECKING:
    from .fidelity import Fidelity

TOKENS = 8192
COLUMNS = ("weights", "perplexity", "nll - FP8", "mean KL", "same top token")


def run(command: Sequence[str]) -> None:
    """Run a quantkit command in its own process, shown as typed; ends the demo with its exit code if it fails."""
    print(f"\n$ quantkit {' '.join(command)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "quantkit", *command]).returncode
    if code:
        raise SystemExit(code)


def measure(artifact: Path, num_tokens: int) -> dict[str, Fidelity]:
    """Fidelity of the decode view of an artifact (label -> figures) to its prefill view on held-out text.

    Raises:
        UsageError: fewer tokens than one block.
        QuantkitError: a view cannot be read.
    """
    from .dequantized import write_bf16_copy
    from .fidelity import fidelity
    from .models import load_model, quiet
    from .text import token_blocks

    if num_tokens < BLOCK_TOKENS:
        raise UsageError(f"{num_tokens} tokens", where="--tokens", accepted=f"{BLOCK_TOKENS} or more")
    decode, prefill = artifact / "decode", artifact / "prefill"
    blocks = token_blocks(decode, "heldout", num_blocks=num_tokens // BLOCK_TOKENS)
    with tempfile.TemporaryDirectory(prefix="quantkit-demo-") as scratch:
        reference = load_model(write_bf16_copy(prefill, Path(scratch, "fp8")))
        candidates = {
            "INT4": load_model(write_bf16_copy(decode, Path(scratch, "int4"))),
            "INT4 as run": load_model(decode),
        }
        with quiet():
            return fidelity(reference, candidates, blocks)


def table(results: dict[str, Fidelity]) -> str:
    """Aligned text: the reference first, then each candidate against it."""
    reference = next(iter(results.values())).reference
    rows = [COLUMNS, ("FP8", f"{reference.value:.3f} ± {reference.stderr:.3f}", "", "", "")]
    for label, result in results.items():
        rows.append(
            (
                label,
                f"{result.perplexity.value:.3f} ± {result.perplexity.stderr:.3f}",
                f"{result.nll_difference.value:+.5f} ± {result.nll_difference.stderr:.5f}",
                f"{result.kl.value:.5f} ± {result.kl.stderr:.5f}",
                f"{100 * result.agreement.value:.2f} % ± {100 * result.agreement.stderr:.2f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="directory of the artifact")
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny-glm")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"held-out tokens to measure on ({TOKENS})")
    parser.add_argument("--samples", help="calibration samples (default: those of the model's recipe)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    fewer = [] if args.samples is None else ["--samples", args.samples]
    run(["convert", args.model, "--w4", *fewer, "-o", str(args.out)])
    run(["verify", str(args.out)])
    print(f"\nLoading both views with transformers, measuring on {args.tokens} held-out tokens ...", flush=True)
    try:
        results = measure(args.out, args.tokens)
    except QuantkitError as problem:
        print(f"demo: {problem}", file=sys.stderr)
        return problem.exit_code
    blocks = len(next(iter(results.values())).reference.block_nll)
    print(f"\n{table(results)}\n")
    print(f"± is one standard error over {blocks} blocks of {BLOCK_TOKENS} tokens; nll and KL in nats per token.")
    print(
        "FP8 and INT4 differ in weights only (BF16 arithmetic). In 'INT4 as run' compressed-tensors also\n"
        "quantizes the activations of the FP8 linears at run time, as engines do, and transformers rounds their\n"
        "block scales to BF16."
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
