"""Text as it comes against the tokenizer's own decoding of everything at once."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE

from quantkit.data import bundled_model
from quantkit.errors import UnsupportedError
from quantkit_serve.engine.detokenizer import Detokenizer, StopStrings
from quantkit_serve.engine.vocabulary import Vocabulary


@cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(bundled_model("tiny-glm") / "tokenizer.json"))
    tokenizer.add_tokens(["wörld✓", " plain"])  # not special: one outside the byte table, one with a space
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁", "a", "b", "▁a", "▁▁", "é", "日本", "😀", "<0x41", "▁the", "\n"]
    tokenizer = Tokenizer(BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@cache
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary.of(tokenizer)


def stream(tokenizer: Tokenizer, tokens: list[int], stops: tuple[str, ...] = ()) -> list[str]:
    detokenizer = Detokenizer(vocabulary(tokenizer), stops)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_all_text_together_is_what_the_tokenizer_makes_of_all_tokens(kind, data) -> None:  # type: ignore[no-untyped-def]
    tokenizer = kind()
    size = tokenizer.get_vocab_size()
    token = st.one_of(
        st.integers(0, min(300, size - 1)), st.integers(0, size + 3)
    )  # mostly bytes and special ones
    tokens = data.draw(st.lists(token, max_size=40))
    assert "".join(stream(tokenizer, tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30))
def test_characters_come_whole(text: str) -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    parts = stream(tokenizer, tokens)
    assert "".join(parts) == expected
    assert any("\ufffd" in part for part in parts) == ("\ufffd" in expected)


def test_a_character_that_never_ends_is_not_lost() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("naïve 😀", add_special_tokens=False).ids
    assert stream(tokenizer, tokens[:-1])[-1] == "\ufffd"


def test_other_decoders_are_refused() -> None:
    tokenizer = Tokenizer(BPE({"a": 0}, []))
    with pytest.raises(UnsupportedError, match="missing"):
        Vocabulary.of(tokenizer)
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedError, match="WordPiece"):
        Vocabulary.of(tokenizer)


def by_characters(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The plain rule: read on until what has been read ends with a stop string."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_stop_strings_are_found_however_the_text_comes(parts: list[str], stops: list[str]) -> None:
    finder = StopStrings(stops)
    text, expected = "", by_characters("".join(parts), stops)
    for part in parts:
        text += finder.push(part)
        assert expected[0].startswith(text), "given out too early"
        if finder.found is not None:
            break
    else:
        text += finder.flush()
    assert (text, finder.found) == expected


def test_only_what_may_start_a_stop_string_waits() -> None:
    finder = StopStrings(["END"])
    assert [finder.push(part) for part in ("abE", "N", "x", "E", "ND", "")] == ["ab", "", "ENx", "", "", ""]
    assert finder.found == "END"


def test_a_stop_string_across_tokens_and_within_a_character() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("say 😀 now", add_special_tokens=False).ids
    assert len(tokens) > 4  # the face alone is several
    detokenizer = Detokenizer(Vocabulary.of(tokenizer), ("😀 n",))
    text = ""
    for token in tokens:
        text += detokenizer.push(token)
        if detokenizer.stop:
            break
    assert (text, detokenizer.stop) == ("say ", "😀 n")
