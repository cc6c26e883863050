"""The report of a calibrated conversion: figures by hand, the heat map's cells, tables, and size at 256 x 78."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from quantkit.artifact.attachments.calibration_html import ROWS, calibration_section
from quantkit.artifact.attachments.coverage import Coverage
from quantkit.artifact.attachments.heatmap import PALETTE, error_steps, heat_map, token_steps
from quantkit.artifact.records import Outcome, TensorRecord

FACTS: dict[str, Any] = {
    "tokens": 500, "shrunk": False, "form": "dense", "percdamp": 0.01, "attempts": 1, "rows_from_floor": 1,
    "error_to_rtn": 0.5, "weight_error_to_rtn": 2.0,
}  # fmt: skip


def weight(layer: int, expert: int | None, part: str, error: float, **facts: Any) -> TensorRecord:
    name = f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
    outcome = Outcome("quantize", {}, "gptq", 32, error, {**FACTS, **facts})
    kept = Outcome("keep")
    return TensorRecord(name, "F8_E4M3", (4, 4), "f", "0", "routed_expert", layer, expert, False, outcome, kept)


def report_of(*records: TensorRecord) -> dict[str, Any]:
    coverage = Coverage()
    for record in records:
        coverage.add(record)
    recipe = {"calibration": {"min_tokens": 128, "percdamp": 0.01}}
    return {"recipe": recipe, "calibration": coverage.layers(), "exceptions": coverage.exceptions()}


RECORDS = (
    weight(3, 0, "gate_proj", 0.3),
    weight(3, 0, "down_proj", 0.4, error_to_rtn=0.7, weight_error_to_rtn=3.0, fold_alpha=0.25),
    weight(3, 2, "up_proj", 0.1, tokens=0, shrunk=True, form="none", error_to_rtn=None),
    weight(4, 1, "up_proj", 0.2, tokens=5, shrunk=True, percdamp=0.1, attempts=2),
    weight(4, None, "o_proj", 0.9, tokens=9000, error_to_rtn=0.1),
)  # fmt: skip


def test_figures_by_hand() -> None:
    report = report_of(*RECORDS)
    assert report["calibration"]["3"] == {
        "experts": [0, 2], "tokens": [500, 0], "errors": [0.353553, 0.1], "errors_to_rtn": [0.6, None],
        "shrunk_experts": [2], "error_to_rtn": 0.6, "weight_error_to_rtn": 2.0, "fold_alpha": 0.25,
        "largest_percdamp": 0.01, "rows_from_floor": 3,
    }  # fmt: skip
    assert report["calibration"]["4"]["experts"] == [1]  # what is no expert's counts in the sums only
    assert report["calibration"]["4"]["error_to_rtn"] == 0.3
    assert report["exceptions"] == {
        "dampened": [{"tensor": RECORDS[3].name, "percdamp": 0.1, "attempts": 2}], "rounded": [RECORDS[2].name],
    }  # fmt: skip


def test_weights_that_were_not_calibrated_say_nothing() -> None:
    plain = replace(RECORDS[0], decode=replace(RECORDS[0].decode, calibration=None))
    report = report_of(plain)
    assert report["calibration"] == {} and calibration_section(report) == ""


def test_section_names_every_exception() -> None:
    html = calibration_section(report_of(*RECORDS))
    assert "Starved experts: 2, of these without any token: 1" in html
    assert "<td>3</td><td>2</td><td class=n>0</td><td class=n>10.0000%</td><td class=n></td>" in html
    assert (
        "than the recipe states (0.01): 1" in html
        and f"<code>{RECORDS[3].name}</code></td><td class=n>0.1" in html
    )
    assert "Only rounded" in html and html.count(RECORDS[2].name) == 1
    for svg in re.findall(r"<svg.*?</svg>", html, re.S):
        ElementTree.fromstring(svg)
    assert len(re.findall("<svg", html)) == 2 and "<script" not in html and "http" not in html


def test_sections_without_exceptions_and_without_experts() -> None:
    html = calibration_section(report_of(RECORDS[0]))
    assert "Starved experts: 0" in html and "(0.01): 0" in html and "Only rounded" not in html
    assert "<svg" not in calibration_section(report_of(RECORDS[4]))


def cells(svg: str) -> dict[str, float]:
    """Area of every colour, in cells, from the paths themselves."""
    found = re.findall(r'<path fill="(#\w+)" d="([^"]*)"', svg)
    rectangles = {c: [(float(w), float(h)) for w, h in re.findall(r"h([\d.]+)v([\d.]+)h", d)] for c, d in found}
    cell = min(w for sizes in rectangles.values() for w, _ in sizes)
    return {colour: round(sum(w for w, _ in sizes) / cell) for colour, sizes in rectangles.items()}


def test_map_shows_every_cell_once() -> None:
    steps = token_steps(128)
    rows = {"1": {0: 0, 1: 0, 2: 600, 3: 1}, "2": {1: 127, 3: 128}}
    svg = heat_map(rows, steps, {"1": "one", "2": 'two<&"'}, "tokens")
    assert cells(svg) == {PALETTE[7]: 2, PALETTE[6]: 1, PALETTE[4]: 1, PALETTE[2]: 1, PALETTE[1]: 1}
    root = ElementTree.fromstring(svg.partition("<p ")[0])
    assert [t.text for t in root.iter("title")] == ["one", 'two<&"']


@pytest.mark.parametrize("least", [0, 1, 8, 128, 4096])
def test_token_steps_are_distinct(least: int) -> None:
    steps = token_steps(least)
    assert sorted(set(steps.edges)) == list(steps.edges) and steps.of(0) == 0 and steps.of(1) == 1
    assert len(steps.colours) == len(steps.labels) == len(steps.edges) + 1 == len(set(steps.labels))


def test_error_steps_span_the_values() -> None:
    steps = error_steps([0.1, 0.18])
    assert (steps.of(0.1), steps.of(0.18)) == (0, len(PALETTE) - 1)
    assert steps.labels[0] == "10.00% to 11.00%" and steps.labels[-1] == "17.00% to 18.00%"
    assert error_steps([0.1, 0.1]).labels == ("10.000%",)


def test_palette_is_readable_in_greyscale() -> None:
    """Relative luminance (WCAG) falls from step to step, neighbours differ by an eighth at least."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    values = [luminance(colour) for colour in PALETTE]
    assert all(dark < light * 0.875 for light, dark in pairwise(values))


def test_large_model_stays_small() -> None:
    rows = {str(layer): {e: (e * 7919 + layer * 104729) % 3000 for e in range(256)} for layer in range(78)}
    svg = heat_map(rows, token_steps(128), dict.fromkeys(rows, "x"), "tokens")
    assert len(svg) < 1 << 20
    height = float(re.findall(r'viewBox="0 0 880 (\d+)"', svg)[0])
    assert 300 < height < 600
    many = [weight(3, e, "up_proj", 0.1, tokens=1, shrunk=True) for e in range(256)]
    assert f"{256 - ROWS} more in report.json" in calibration_section(report_of(*many))
