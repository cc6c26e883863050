"""Reports of what the statistics really give: compared, judged and told, without anything written by hand."""

from __future__ import annotations

import json
import random
import re
from datetime import UTC, datetime
from pathlib import Path

import jsonschema_rs
import pytest

from quantkit_evals.compare import compare
from quantkit_evals.comparison import Verdict
from quantkit_evals.gate import judge, load_gate
from quantkit_evals.report.annotations import annotations
from quantkit_evals.report.document import document, schema
from quantkit_evals.report.html import html
from quantkit_evals.report.junit import junit_xml
from quantkit_evals.report.markdown import markdown
from quantkit_evals.report.report import Outcome, Report
from quantkit_evals.run import Item, Run, Task
from tests.evals.report import builder

GATE = """
schema_version: 1
name: own
description: for a test
rules:
- metric: fidelity.kl
  max: {kl}
- metric: fidelity.perplexity
  max_ratio: 1.05
- metric: cloze.acc
  non_inferiority: 0.8
  required: {required}
"""


def run(label: str, *, clusters: int = 100) -> Run:
    """600 cloze items and 32 blocks; the candidate loses 3 % of the items and some likelihood."""
    is_baseline, draw = label == "fp8", random.Random(7)
    pair = () if is_baseline else (builder.KL,)
    items = []
    for n in range(600):
        right = draw.random() < 0.6
        is_changed = not is_baseline and n % 33 == 0
        items.append(Item("cloze", f"p{n}", f"d{n % clusters}", f"{n:064x}", {"acc": float(right != is_changed)}))
    for n in range(32):
        nll = 128 * draw.gauss(2.5, 0.2)
        values = {"perplexity": nll} if is_baseline else {"perplexity": nll + 0.1, "kl": 0.09 + n / 1000}
        items.append(Item("fidelity", f"b{n}", f"b{n}", f"{n + 999:064x}", values, dict.fromkeys(values, 128.0)))
    tasks = (
        Task("cloze", "c1" * 32, "decode", (builder.ACC,)),
        Task("fidelity", "f1" * 32, "decode", (builder.PPL, *pair)),
    )
    return Run(builder.candidate(label), {"seed": 0}, tasks, tuple(items))


def report(folder: Path, *, kl: float, required: bool) -> Report:
    path = folder / "own.yaml"
    path.write_text(GATE.format(kl=kl, required=str(required).lower()))
    compared = compare(run("fp8"), run("dual+fp8"))
    return Report.of(compared, judge(load_gate(path), compared))


@pytest.mark.parametrize(
    "kl, required, outcome",
    [(0.01, False, Outcome.PASS), (0.0001, False, Outcome.FAIL), (0.01, True, Outcome.UNDECIDED)],
)
def test_all_forms_agree(tmp_path: Path, kl: float, required: bool, outcome: Outcome) -> None:
    found = report(tmp_path, kl=kl, required=required)
    assert found.outcome is outcome
    told = document(found)
    validator = jsonschema_rs.Draft202012Validator(schema())
    assert [e.message for e in validator.iter_errors(json.loads(json.dumps(told, allow_nan=False)))] == []
    text = markdown(found)
    word = {Outcome.PASS: "PASSED", Outcome.FAIL: "FAILED", Outcome.UNDECIDED: "UNDECIDED"}[outcome]
    assert text.startswith(f"**{word}: ") and annotations(found)[0].split("::")[2].startswith(f"{word}: ")
    assert f"is-{outcome.value}" in html(found).decode()
    failures = junit_xml(found, made=datetime(2026, 1, 1, tzinfo=UTC)).count(b"<failure ")
    assert failures == (outcome is not Outcome.PASS)


def test_numbers_are_those_of_the_records(tmp_path: Path) -> None:
    found = report(tmp_path, kl=0.01, required=False)
    baseline, candidate = run("fp8"), run("dual+fp8")
    right = [sum(i.values["acc"] for i in r.items_of("cloze")) for r in (baseline, candidate)]
    changed = [
        b.values["acc"] - c.values["acc"]
        for b, c in zip(baseline.items_of("cloze"), candidate.items_of("cloze"), strict=True)
    ]
    text = markdown(found)
    assert f"| {100 * right[0] / 600:.2f} ± " in text and f"| {100 * right[1] / 600:.2f} ± " in text
    assert f"| {100 * (right[1] - right[0]) / 600:+.2f} ± " in text
    assert f"| {changed.count(1.0)} / {changed.count(-1.0)} |" in text
    kl = sum(i.values["kl"] for i in candidate.items_of("fidelity")) / (32 * 128)
    assert re.search(rf"\| fidelity\.kl \| 32 \| – \| {kl:.4g} ± [0-9.]+ nats/token", text)


def test_one_cluster_is_told_as_unknown() -> None:
    compared = compare(run("fp8", clusters=1), run("dual+fp8", clusters=1))
    found = Report.of(compared)
    text = markdown(found) + html(found).decode()
    assert not re.search(r"\b(nan|inf|None)\b", text)
    assert "one independent item only" in text and "interval unknown" in text
    (accuracy,) = [metric for metric in compared.metrics if metric.name == "cloze.acc"]
    assert accuracy.non_inferiority is not None and accuracy.non_inferiority.verdict is Verdict.UNDECIDED
    json.dumps(document(found), allow_nan=False)
