"""The HTML page: well formed, self-contained, accessible, the same bytes twice, plots to scale."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from lxml import etree
from lxml import html as parser

from quantkit_evals.comparison import Verdict
from quantkit_evals.report.curves import Series, curves
from quantkit_evals.report.html import html
from quantkit_evals.report.plots import Change, Estimate, flips, forest
from quantkit_evals.report.report import Report
from quantkit_evals.report.svg import Scale
from quantkit_evals.run import CurvePoint
from tests.evals.report import builder

NAMES = list(builder.REPORTS)
MAKERS = list(builder.REPORTS.values())


def svg(text: str) -> Any:
    """Parsed as XML, which takes no bad nesting."""
    return etree.fromstring(text)


@pytest.mark.parametrize("make", MAKERS, ids=NAMES)
def test_self_contained_and_accessible(make: Callable[[], Report]) -> None:
    page = html(make())
    assert page == html(make())
    text = page.decode()
    root = parser.document_fromstring(text)
    assert not root.xpath("//script | //link | //img | //iframe | //object | //*[@src or @href or @onload]")
    assert "url(" not in text and "@import" not in text
    ids = root.xpath("//@id")
    assert len(ids) == len(set(ids))
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        found = svg(picture)
        named = {e.get("id"): e.text for e in found if e.tag in ("title", "desc")}
        assert found.get("role") == "img" and found.get("aria-labelledby").split() == list(named)
        assert all(named.values())
        numbers = [float(v) for e in found.iter() for k in ("x", "y", "x1", "x2", "y1", "y2", "width", "height")
                   if (v := e.get(k))]  # fmt: skip
        assert all(0 <= n <= 5000 for n in numbers)
    for figure in root.xpath("//figure"):
        assert figure.xpath("./figcaption") and figure.xpath("./svg") and figure.xpath("./details//table")
    assert re.search(r"\bnan\b|\binf\b|None", text) is None


def test_says_all_that_a_reader_signs() -> None:
    text = parser.document_fromstring(html(builder.undecided()).decode()).text_content().replace("\u00a0", " ")
    for said in (
        "UNDECIDED: dual+fp8: gate default", "0.20 points inside the limit", "about 2,700 more items",
        "about 5,200 items would settle it (now 2,500)", builder.PAIR_ID, "0.4.13", "16-bit activations",
        "61.24 ± 0.97 %", "-0.60 ± 0.41 points", "1 item not scored (p9)", "9a" * 32, "95 % interval",
    ):  # fmt: skip
        assert said in text, said


def test_plots_by_what_was_measured() -> None:
    captions = [e.text for e in parser.document_fromstring(html(builder.several()).decode()).iter("figcaption")]
    assert captions == [
        "Differences of scores, points",
        "Perplexity, ratio to the baseline",
        "Measured between baseline and candidate, nats/token, lower is better",
        "Measured between baseline and candidate, %, higher is better",
        "fidelity: KL divergence by position",
        "fidelity: KL divergence by context length",
        "Flips: items that changed",
    ]
    only_kl = Report.of(builder.comparison("dual", builder.kl()))
    captions = [e.text for e in parser.document_fromstring(html(only_kl).decode()).iter("figcaption")]
    assert (
        captions[0] == "Measured between baseline and candidate, nats/token, lower is better"
        and len(captions) == 3
    )


def test_forest_places_values_on_its_scale() -> None:
    rows = [Estimate("a", -0.5, -1.0, 0.0, (-0.8,), Verdict.UNDECIDED, "n"),
            Estimate("b", -2.0, -2.5, -1.5, (-0.8,), Verdict.FAIL, "n"),
            Estimate("c", float("nan"), float("nan"), float("nan"), (), None, "unknown")]  # fmt: skip
    found = svg(forest("k", "t", "points", rows, zero=0.0, sign=True))
    ticks = {
        float(e[0].text if len(e) else e.text): float(e.get("x"))
        for e in found.iter("text") if e.get("text-anchor") == "middle" and re.fullmatch(r"[-+.0-9]+", e.text)
    }  # fmt: skip
    left, right = min(ticks), max(ticks)

    def at(value: float) -> float:
        return ticks[left] + (ticks[right] - ticks[left]) * (value - left) / (right - left)

    spans = [(float(e.get("x1")), float(e.get("x2"))) for e in found.iter("line") if e.get("y1") == e.get("y2")]
    assert (pytest.approx(at(-1.0), abs=0.2), pytest.approx(at(0.0), abs=0.2)) in spans
    assert (pytest.approx(at(-2.5), abs=0.2), pytest.approx(at(-1.5), abs=0.2)) in spans
    limits = [float(e.get("x1")) for e in found.iter("line") if e.get("class") == "limit"]
    assert limits == [pytest.approx(at(-0.8), abs=0.2)] * 2
    (diamond,) = found.iter("polygon")
    corners = [float(corner.split(",")[0]) for corner in diamond.get("points").split()]
    assert sum(corners) / 4 == pytest.approx(at(-0.5), abs=0.2)
    assert diamond.get("class") == "v undecided"


def test_flips_and_curves_are_to_scale() -> None:
    found = svg(flips("k", "t", [Change("a", 30, 10), Change("b", 0, 0)]))
    widths = [float(e.get("width")) for e in found.iter("rect")]
    assert widths[0] == pytest.approx(3 * widths[1], abs=0.3) and widths[2:] == [0, 0]
    nan = float("nan")
    points = (CurvePoint(0, 10, 1.0, 0.1), CurvePoint(10, 20, 2.0, nan), CurvePoint(20, 30, nan, nan),
              CurvePoint(30, 31, 4.0, 0.1))  # fmt: skip
    found = svg(curves("k", "t", "x", "y", [Series("s", points)]))
    lines = [e.get("points").split() for e in found.iter("polyline")]
    assert [len(one) for one in lines] == [2, 1]  # a gap where the value is not known
    heights = [float(p.split(",")[1]) for one in lines for p in one]
    assert heights[0] - heights[1] == pytest.approx((heights[1] - heights[2]) / 2, abs=0.2)
    titles = [e.text for e in found.iter("title")]
    assert "s, 10 to 19: 2" in titles and "s, 30: 4 ± 0.1" in titles


@pytest.mark.parametrize(
    "values",
    [(0.0, 1.0), (-3e-6, 4e-6), (12.3, 12.3), (0.0, 0.0), (), (math.nan, 5.0), (-1e9, 1e9), (0.9999, 1.0002)],
)
def test_scales_hold_their_values(values: tuple[float, ...]) -> None:
    scale = Scale.of(values, 100, 500)
    for value in values:
        assert math.isnan(value) or 100 <= scale.at(value) <= 500
    assert scale.ticks[0] == pytest.approx(scale.low) and scale.ticks[-1] == pytest.approx(scale.high)
    labels = [scale.label(tick) for tick in scale.ticks]
    assert len(set(labels)) == len(labels) <= 12 and not any(
        label.startswith("-0.0") and float(label) == 0 for label in labels
    )
