"""Sizes: both unit families, what is refused, and how results are spelled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import UsageError
from quantkit.units import format_bytes, format_gb, format_gib, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        (4096, 4096),
        ("512B", 512),
        ("1KB", 1000),
        ("1kb", 1000),
        ("1KiB", 1024),
        ("900 MiB", 943_718_400),
        ("140GiB", 150_323_855_360),
        ("140GB", 140_000_000_000),
        ("140.4 gib", 150_753_352_089),
        (".5MB", 500_000),
        ("2.TB", 2_000_000_000_000),
        ("1TiB", 1_099_511_627_776),
        ("  8 GB ", 8_000_000_000),
    ],
)
def test_parse(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GB", "0", "0.4B", "1e9", "1,5GB", "12 GBit", "1 2GB", "nan", "٣GB"]
)
def test_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(text, where="--gpu-memory")
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith("--gpu-memory: ")
    assert "GiB" in str(caught.value)


@pytest.mark.parametrize("value", [True, None, 1.5])
def test_refuses_other_types(value: object) -> None:
    with pytest.raises(UsageError):
        parse_bytes(value)  # type: ignore[arg-type]


def test_a_bare_letter_names_both_readings() -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes("80G")
    assert caught.value.accepted == "80GB (powers of 1000) or 80GiB (powers of 1024)"


@pytest.mark.parametrize(
    ("nbytes", "gb", "gib"),
    [
        (755_617_140_416, "755.62 GB", "703.72 GiB"),
        (1_029_173_256_720, "1029.17 GB", "958.49 GiB"),
        (943_718_400, "943.7 MB", "900.0 MiB"),
        (1_500, "1.5 kB", "1.5 KiB"),
        (999, "999 B", "999 B"),
        (0, "0 B", "0 B"),
        (-2_000_000_000, "-2.00 GB", "-1.86 GiB"),
        (20_000_000_000_000, "20.00 TB", "18.19 TiB"),
    ],
)
def test_format(nbytes: int, gb: str, gib: str) -> None:
    assert format_gb(nbytes) == gb
    assert format_gib(nbytes) == gib


def test_format_both() -> None:
    assert format_bytes(755_617_140_416) == "755.62 GB (703.72 GiB)"
    assert format_bytes(12) == "12 B"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (42.4, "42 s"), (360, "6 min"), (7500, "2 h 05 min")],
)
def test_seconds(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected


@given(st.integers(1, 10**15), st.sampled_from([("KB", 1000), ("GiB", 2**30), ("MB", 10**6), ("B", 1)]))
def test_whole_numbers_are_exact(number: int, unit: tuple[str, int]) -> None:
    assert parse_bytes(f"{number}{unit[0]}") == number * unit[1]
