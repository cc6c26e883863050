"""What is worth a recording: kinds of steps that come often, within a bound of memory."""

from __future__ import annotations

import pytest

from quantkit_serve.model import recordings
from quantkit_serve.model.recordings import FIRST, Kind, Recordings


def kind(tokens: int, reach: int = 256) -> Kind:
    return Kind(tokens, reach, False, 1, 0)


def steps(found: Recordings[str], which: Kind, count: int, nbytes: int = 1) -> str:
    """What becomes of each step of a kind: n for as ever, r for recorded, p for repeated."""
    text = ""
    for _ in range(count):
        if found.find(which) is not None:
            text += "p"
        elif found.wants(which):
            found.put(which, f"of {which.tokens}", nbytes)
            text += "r"
        else:
            text += "n"
    return text


def test_the_third_step_is_recorded_whenever_it_comes() -> None:
    found: Recordings[str] = Recordings()
    assert FIRST == 3
    assert steps(found, kind(1), 2) == "nn"
    assert steps(found, kind(2), 5) == "nnrpp"
    assert steps(found, kind(1), 3) == "rpp"
    assert found.find(kind(1)) == "of 1" and found.find(kind(3)) is None
    assert found.nbytes == 2


def test_the_ones_used_longest_ago_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MOST_BYTES", 30)
    found: Recordings[str] = Recordings()
    for tokens in (1, 2, 3):
        assert steps(found, kind(tokens), 6, nbytes=10) == "nnrppp"
    assert found.find(kind(1)) and found.nbytes == 30
    assert steps(found, kind(4), 3, nbytes=15) == "nnr"
    assert [found.find(kind(n)) for n in (1, 2, 3, 4)] == ["of 1", None, None, "of 4"]
    assert found.nbytes == 25
    assert steps(found, kind(5), 3, nbytes=31) == "nnr"  # alone it may be
    assert found.nbytes == 31


def test_what_made_room_before_it_paid_has_to_come_twice_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MOST_BYTES", 10)
    found: Recordings[str] = Recordings()
    assert steps(found, kind(1), 4, nbytes=10) == "nnrp"
    assert steps(found, kind(2), 6, nbytes=10) == "nnrppp"
    assert steps(found, kind(1), 6, nbytes=10) == "nnnnnr"
    assert steps(found, kind(2), 3, nbytes=10) == "nnr"  # it had paid
    assert steps(found, kind(1), 12, nbytes=10) == 11 * "n" + "r"


def test_kinds_that_change_all_the_time_are_hardly_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MOST_BYTES", 100)
    found: Recordings[str] = Recordings()
    text = "".join(steps(found, kind(n % 30), 1, nbytes=10) for n in range(3000))
    assert text.count("r") < 30 * 7  # of a hundred steps each


def test_kinds_that_are_remembered_are_bounded() -> None:
    found: Recordings[str] = Recordings()
    assert steps(found, kind(0), 3) == "nnr"
    for n in range(1, 300):
        found.wants(kind(n))
    assert found.nbytes == 0 and found.find(kind(0)) is None
    assert steps(found, kind(0), 3) == "nnr"


def test_what_is_refused_is_not_asked_for_again() -> None:
    found: Recordings[str] = Recordings()
    assert steps(found, kind(8), 2) == "nn" and found.wants(kind(8))
    found.refuse(kind(8), "it reads")
    assert steps(found, kind(8), 9) == 9 * "n"
    assert steps(found, kind(9), 3) == "nnr"
    found.wants(kind(20))
    found.refuse(kind(20), "too large", is_too_large=True)
    assert steps(found, kind(20), 9) == steps(found, kind(30), 9) == 9 * "n"
    assert steps(found, kind(19), 3) == steps(found, kind(30, reach=512), 3) == "nnr"
