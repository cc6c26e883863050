"""The JSON document against its schema, and that it holds what the comparison holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import jsonschema_rs
import pytest

from quantkit_evals.report.document import SCHEMA, document, schema
from quantkit_evals.report.report import Report
from tests.evals.report import builder


def objects(found: Any) -> list[dict[str, Any]]:
    """Every object of a schema that describes an object with fixed keys."""
    inner = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    own = [found] if isinstance(found, dict) and "additionalProperties" in found else []
    return [*own, *(o for value in inner for o in objects(value))]


@pytest.mark.parametrize("make", builder.REPORTS.values(), ids=list(builder.REPORTS))
def test_documents_follow_the_schema(make: Callable[[], Report]) -> None:
    found = document(make())
    text = json.dumps(found, allow_nan=False)
    validator = jsonschema_rs.Draft202012Validator(schema())
    if make is not builder.hostile:  # the validator takes no halves of surrogate pairs; JSON has them escaped
        assert [error.message for error in validator.iter_errors(json.loads(text))] == []


def test_the_schema_refuses() -> None:
    jsonschema_rs.meta.validate(json.loads(SCHEMA.read_bytes()))
    validator = jsonschema_rs.Draft202012Validator(schema())
    sound = document(builder.failed())
    assert validator.is_valid(sound)
    for path, value in {
        ("outcome",): "maybe", ("more",): 1, ("candidates",): [], ("candidates", 0, "metrics", 0, "items"): -1,
        ("candidates", 0, "gate", "rules", 0, "by"): "far", ("baseline", "label"): None,
        ("candidates", 0, "metrics", 0, "candidate"): None,
    }.items():  # fmt: skip
        broken = deepcopy(sound)
        place: Any = broken
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        assert not validator.is_valid(broken), path


def test_figures_are_exact() -> None:
    report = builder.failed()
    comparison = report.judged[0].comparison
    found = document(report)
    (candidate,) = found["candidates"]
    assert candidate["candidate"] == comparison.candidate.candidate
    assert found["baseline"]["candidate"] == comparison.baseline.candidate
    assert candidate["settings"] == comparison.candidate.settings
    for row, metric in zip(candidate["metrics"], comparison.metrics, strict=True):
        assert row["candidate"] == {"value": metric.candidate.value, "stderr": metric.candidate.stderr}
        assert row["interval"] == {"low": metric.interval.low, "high": metric.interval.high}
        assert row["p_adjusted"] == metric.p_adjusted
    rule = candidate["gate"]["rules"][0]
    assert (rule["verdict"], rule["by"]) == ("fail", report.judged[0].gate.rules[0].by)  # type: ignore[union-attr]
    assert (found["outcome"], found["success"], candidate["outcome"]) == ("fail", False, "fail")
    curve = candidate["tasks"][1]["curves"]["kl by position"]
    assert curve[1] == {"start": 64, "stop": 128, "value": 6e-4 * 1.25, "stderr": 6e-4 / 10}
    assert candidate["tasks"][0]["skipped"] == [{"item": "p9", "reason": "longer than the context: 300 > 256"}]


def test_what_is_not_finite_is_null_and_said() -> None:
    found = document(builder.unknown())
    first, second = found["candidates"][0]["metrics"]
    assert first["difference"]["stderr"] is None and first["interval"]["low"] is None
    assert second["candidate"] == {"value": None, "stderr": None}
    assert any("standard error of the difference, interval, p unknown: it has one" in gap for gap in found["gaps"])
    assert any("fidelity.kl: score" in gap and "not a finite number" in gap for gap in found["gaps"])


def test_closed() -> None:
    """Only what users or tasks name may have other keys."""
    free = [o for o in objects(schema()) if o["additionalProperties"] is not False]
    assert len(free) == 3  # curves, and the digests of two runs
