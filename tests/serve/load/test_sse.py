"""Events come out the same in whatever pieces their bytes come in."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from quantkit_serve.load.sse import EventReader

LINE = st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), max_size=12)
END = st.sampled_from(["\n", "\r\n"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[str]]:
    """A stream and the events in it."""
    text, events = "", []
    for data in draw(st.lists(st.lists(LINE, min_size=1, max_size=3), max_size=5)):
        end = draw(END)
        if draw(st.booleans()):
            text += f": comment{end}"
        if draw(st.booleans()):
            text += f"id: 7{end}retry{end}"
        text += "".join(f"data: {line}{end}" for line in data) + end
        events.append("\n".join(data))
    return text.encode() + draw(st.sampled_from([b"", b"data: cut off", b"data: cut off\n"])), events


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    return [stream[a:b] for a, b in itertools.pairwise(places)]


@given(streams(), st.lists(st.integers(0, 1 << 16), max_size=8))
def test_pieces_do_not_matter(made: tuple[bytes, list[str]], cuts: list[int]) -> None:
    stream, events = made
    reader = EventReader()
    assert [data for piece in pieces(stream, cuts) for data in reader.feed(piece)] == events


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_as_openai_reads_them(end: str) -> None:
    texts = [json.dumps({"text": "naïve 🤖"}, ensure_ascii=False), "[DONE]", "data: with: colons", ""]
    stream = "".join(f"data: {text}{end}{end}" for text in texts).encode()
    theirs = [event.data for event in SSEDecoder().iter_bytes(iter([stream]))]
    for size in (1, 2, 3, 7, len(stream)):
        reader = EventReader()
        ours = [d for at in range(0, len(stream), size) for d in reader.feed(stream[at : at + size])]
        assert ours == theirs == texts


def test_a_value_needs_no_space_and_a_mark_at_the_start_is_no_text() -> None:
    assert list(EventReader().feed(b"\xef\xbb\xbfdata:a\n\n")) == ["a"]
