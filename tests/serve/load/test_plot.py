"""The plot is well-formed SVG that shows every figure."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit_serve.load.drive import Level
from quantkit_serve.load.plot import render_svg, scale
from quantkit_serve.load.record import Record
from quantkit_serve.load.result import LevelResult, LoadResult

SVG = "{http://www.w3.org/2000/svg}"


def result(*levels: LevelResult, model: str = "m") -> LoadResult:
    return LoadResult("http://x", model, "text", 8, 4, 16, 0, True, None, levels)


def level(concurrency: int, *records: Record, rate: float | None = None) -> LevelResult:
    one = Level(rate=rate) if rate else Level(concurrency)
    return LevelResult.of(one, records, 2.0, output_len=4, price_per_hour=None)


GOOD = Record(0.0, 2.0, (0.5, 1.0, 1.5), 8, 3)


def test_every_figure_is_there() -> None:
    drawn = render_svg(result(level(1, GOOD), level(4, GOOD, Record(0.0, 1.0, error="x")), model="a<b>&c"))
    root = ElementTree.fromstring(drawn)
    titles = [t.text or "" for t in root.iter(f"{SVG}title")]
    assert titles[0].startswith("a<b>&c: 8 tokens in, 4 out")
    assert titles.count("output: 1.5") == 2 and titles.count("prompt and output: 5.5") == 2
    assert titles.count("median: 500") == 4  # to the first token, per output token
    assert titles.count("99 %: 1,500") == 2
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert texts.count("4 (1 failed)") == 4 and texts.count("requests at a time") == 4


def test_a_level_without_answers_has_no_marks() -> None:
    drawn = render_svg(result(level(0, Record(0.0, 1.0, error="x"), rate=2.5)))
    root = ElementTree.fromstring(drawn)
    assert (
        len([t for t in root.iter(f"{SVG}title") if ":" in (t.text or "")[1:]]) == 3
    )  # the document's, two zeros
    assert "requests per second" in {t.text for t in root.iter(f"{SVG}text")} and "nan" not in drawn


@given(st.floats(1e-6, 1e9))
def test_scale(most: float) -> None:
    step, top = scale(most)
    assert top >= most * (1 - 1e-6) and top - most <= step * (1 + 1e-6)
    assert 1 <= round(top / step) <= 5
    assert round(step / 10 ** math.floor(math.log10(step) + 1e-9), 6) in (1, 2, 5)


@pytest.mark.parametrize("most", [0.0, -1.0])
def test_an_empty_axis(most: float) -> None:
    assert scale(most) == (1.0, 1.0)
