"""A configuration as a run states it: a file of strangers, so that everything may stand there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quantkit_evals.configuration import Configuration
from quantkit_evals.report.document import document
from quantkit_evals.report.markdown import markdown
from quantkit_evals.report.report import Report
from tests.evals.report import builder


def test_what_is_stated_is_what_was() -> None:
    for made in (Configuration("dual", "fp8"), Configuration("fp8", "f32", "prefill", "float32", "dynamic128")):
        assert Configuration.of_json(made.to_json()) == made
    assert Configuration.of_json({"weights": "int4"}) == Configuration("int4")


@pytest.mark.parametrize(
    "stated",
    [None, [], "dual", {}, {"weights": "int5"}, {"weights": ["dual"]}, {"weights": "dual", "kv_dtype": None},
     {"weights": "dual", "fp8_activations": []}, {"weights": "dual", "speed": "fast"}, {"kv_dtype": "fp8"}],
)  # fmt: skip
def test_what_is_no_configuration_is_none_and_still_shown(stated: Any) -> None:
    assert Configuration.of_json(stated) is None
    found = builder.comparison("dual")
    run = replace(found.candidate, candidate={**found.candidate.candidate, "configuration": stated})
    report = Report.of(replace(found, candidate=run))
    assert document(report)["candidates"][0]["activations"] == "not stated"
    assert "configuration" in markdown(report)
