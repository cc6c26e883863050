"""What quantization costs on a bundled model, by method and by part: INT4 weights, FP8 pages, the dual path.

    python bench/eval/quality.py [--model tiny-glm] [--methods rtn,mse,gptq] [--limit N] [--artifacts DIR]
        [--json FILE]

Each method's artifact is evaluated on the suite ``quick`` against the publisher's FP8 weights with BF16 pages, all
of it decode-forced. All methods' artifacts hold the same FP8 weights, so the first one's serve as the baseline of
all, and its answers are made once. Quality, not speed: anything may run beside it. The table is
docs/evaluating.md's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import quantkit
from measure import Row, write_rows
from quantkit_evals.choice import Choice
from quantkit_evals.comparison import MetricComparison
from quantkit_evals.evaluation import evaluate_model, tasks_of
from quantkit_evals.gate import find_gate
from quantkit_evals.harness.cache import default_cache
from quantkit_evals.report.report import Judged, Report
from quantkit_evals.report.wording import difference_unit, unit_of
from quantkit_evals.session import Settings
from quantkit_serve.start.servable import Servable

MARGIN = 0.008  # of cloze, a fraction
SHOWN = (
    "fidelity.kl",
    "fidelity.perplexity",
    "cloze.acc",
    "next_sentence.acc_mutual_info",
    "copy.acc_mutual_info",
)
# What each method is measured with: everything of the default method, weights and the served path of the others.
PARTS: dict[str, Choice] = {
    "gptq": Choice(weights=("fp8", "int4", "dual"), kv_dtypes=("bf16", "fp8")),
    "": Choice(weights=("int4", "dual"), kv_dtypes=("bf16", "fp8")),
}


def artifact(model: str, method: str, folder: Path) -> Servable:
    """Converted if it isn't there."""
    path = folder / f"{model}-{method}"
    if not path.is_dir():
        quantkit.convert(quantkit.plan(model, method=method), path).close()
    return Servable(path, f"{model}-{method}")


def evaluated(model: str, methods: list[str], folder: Path, limit: int | None) -> Iterator[tuple[str, Report]]:
    settings = Settings(
        **tasks_of("quick", ()), gate=find_gate("default"), margin=MARGIN, limit=limit, cache=default_cache()
    )
    first = artifact(model, methods[0], folder)
    for method in methods:
        choice = PARTS.get(method, PARTS[""])
        source = artifact(model, method, folder)
        if source != first:
            choice = replace(choice, baseline=first.folder)
        output = folder / f"{model}-{method}-eval"
        yield method, evaluate_model(source, choice, settings, output=output, is_attached=False, say=print)


def figure(found: MetricComparison) -> str:
    """For the table: the value of a pair's metric, a ratio of perplexities, a difference in points."""
    low, high = found.interval.low, found.interval.high
    if found.metric.is_of_pair:
        return f"{1000 * found.candidate.value:.2f} ({1000 * low:.2f} to {1000 * high:.2f})"
    if found.ratio is not None and found.ratio_interval is not None:
        return f"{found.ratio:.4f} ({found.ratio_interval.low:.4f} to {found.ratio_interval.high:.4f})"
    assert found.difference is not None
    return f"{100 * found.difference.value:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"


def table_row(method: str, judged: Judged) -> str:
    by_name = {found.name: found for found in judged.comparison.metrics}
    verdict = by_name["cloze.acc"].non_inferiority
    said = "" if verdict is None else verdict.verdict.value
    cells = [figure(by_name[name]) for name in SHOWN]
    return f"| {method} | {judged.label} | {' | '.join(cells)} | {said} | {judged.outcome.value} |"


def rows_of(method: str, judged: Judged) -> Iterator[Row]:
    for found in judged.comparison.metrics:
        is_own = found.difference is None
        value = found.candidate.value if found.difference is None else found.difference.value
        factor = 100 if found.metric.is_percent else 1
        unit = unit_of(found.metric) if is_own else difference_unit(found.metric)
        yield Row(f"{method}, {judged.label}: {found.name}", factor * value, unit)
        yield Row("  95 % confidence, from", factor * found.interval.low, unit)
        yield Row("  to", factor * found.interval.high, unit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-glm")
    parser.add_argument("--methods", default="rtn,mse,gptq")
    parser.add_argument("--limit", type=int, help="items of each task (default: all)")
    parser.add_argument("--artifacts", type=Path, help="folder to keep them in (default: a temporary one)")
    parser.add_argument("--json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quantkit-bench-") as scratch:
        folder = args.artifacts or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        rows: list[Row] = []
        lines: list[str] = []
        for method, report in evaluated(args.model, args.methods.split(","), folder, args.limit):
            for judged in report.judged:
                lines.append(table_row(method, judged))
                rows += rows_of(method, judged)
                print(lines[-1], flush=True)
    print("\n".join(["", f"| method | candidate | {' | '.join(SHOWN)} | cloze within 0.8 | gate |", *lines]))
    write_rows(rows, args.json)


if __name__ == "__main__":
    main()
