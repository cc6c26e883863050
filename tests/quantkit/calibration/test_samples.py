"""The calibration set: deterministic, from the source's own tokenizer, and one clear error for every bad text."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.calibration.samples import CalibrationSet, calibration_set
from quantkit.calibration.texts import read_texts
from quantkit.checkpoint import open_checkpoint
from quantkit.data import bundled_model, bundled_text
from quantkit.errors import EnvironmentProblem, QuantkitError, SourceError, UsageError
from quantkit.recipe.sections import CalibrationSection
from tests.hub_server import HubServer

END = 0  # <|endoftext|> of the bundled models
CHAT = [{"role": "user", "content": "What is a weasel?"}, {"role": "assistant", "content": "A small animal."}]


def make(source: str | Path = "tiny-glm", **section: Any) -> CalibrationSet:
    with open_checkpoint(str(source)) as checkpoint:
        return calibration_set(CalibrationSection(**section), checkpoint)


def tokenizer() -> Any:
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(bundled_model("tiny-glm") / "tokenizer.json"))


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the bundled model to damage."""
    return Path(shutil.copytree(bundled_model("tiny-glm"), tmp_path / "model"))


def test_bundled_text_by_default() -> None:
    found = make()
    assert found.token_ids.shape == (128, 256) and found.token_ids.dtype == np.int64
    # the oracle: the tokenizers library by hand, one piece of text after the other
    stream: list[int] = []
    for part in bundled_text("calib").read_text(encoding="utf-8").split("\n\n"):
        stream += [*tokenizer().encode(part, add_special_tokens=False).ids, END]
    pieces = {tuple(stream[i : i + 256]) for i in range(0, len(stream) - 255, 256)}
    rows = [tuple(row) for row in found.token_ids.tolist()]
    assert len(set(rows)) == 128 and set(rows) <= pieces
    assert found.description["tokens"] == len(stream)
    assert found.description["text_sha256"] == [hashlib.sha256(bundled_text("calib").read_bytes()).hexdigest()]
    assert "bundled" not in json.dumps(found.description) and os.sep not in json.dumps(found.description)


def test_the_set_is_pinned() -> None:
    """Artifacts name this digest: a change of it is a change of every calibrated artifact."""
    assert make().digest == "358feff7800a7f5c6fccb852de936b91f3e5ad6b88441855c17b5ddd1e660e2d"
    assert make("tiny-qwen3").digest == make().digest  # the two share text and tokenizer


def test_selection_depends_on_the_seed_alone() -> None:
    first = make(samples=4, length=32)
    assert (make(samples=4, length=32).token_ids == first.token_ids).all()
    other = make(samples=4, length=32, seed=1)
    assert other.digest != first.digest and (other.token_ids != first.token_ids).any()
    more = make(samples=5, length=32)  # fewer samples are a subset of more
    assert {tuple(r) for r in first.token_ids.tolist()} < {tuple(r) for r in more.token_ids.tolist()}
    every = make(samples=284, length=256)  # all that there are: in the order of the text
    assert (
        every.token_ids.ravel().tolist()[:20]
        == make(samples=284, length=256, seed=9).token_ids.ravel().tolist()[:20]
    )


def test_digest_covers_every_token(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("The weasel sleeps all day and hunts at night. " * 40)
    first = make(data=str(text), samples=2, length=16)
    moved = tmp_path / "b.txt"
    text.rename(moved)
    assert make(data=str(moved), samples=2, length=16).digest == first.digest  # the place is nothing
    moved.write_text("The weasel sleeps all day and hunts at dusk. " * 40)
    assert make(data=str(moved), samples=2, length=16).digest != first.digest


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One.\n\nTwo.\n\nThree weasels went to sea in a boat. " * 3)
    found = make(data=str(tmp_path / "a.txt"), samples=1, length=8)
    assert found.description["documents"] == 1


def test_directory_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("A weasel ran over the hill and far away.")
    jsonl(
        tmp_path / "a.jsonl", {"text": "First comes the fox, then the goose."}, {"text": " "}, {"messages": CHAT}
    )
    (tmp_path / ".hidden").write_bytes(b"\xff")
    texts = read_texts(str(tmp_path), 1)
    assert [d.where.rpartition("/")[2] for d in texts.documents] == ["a.jsonl:1", "a.jsonl:3", "b.txt"]
    found = make(data=str(tmp_path), samples=1, length=16)
    first = tokenizer().encode("First comes the fox, then the goose.", add_special_tokens=False).ids
    assert found.description["documents"] == 3
    assert found.token_ids.shape == (1, 16)
    whole = make(data=str(tmp_path), samples=found.description["tokens"] // 2, length=2).token_ids.ravel().tolist()
    assert whole[: len(first) + 1] == [*first, END]


def test_chats_go_through_the_chat_template(tmp_path: Path) -> None:
    import transformers

    data = jsonl(tmp_path / "chat.jsonl", {"messages": CHAT})
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(str(bundled_model("tiny-glm")))
    expected = fast(fast.apply_chat_template(CHAT, tokenize=False), add_special_tokens=False)["input_ids"]
    length = len(expected) // 2 * 2
    assert make(data=data, samples=length // 2, length=2).token_ids.ravel().tolist() == expected[:length]


def test_truncation_that_a_tokenizer_asks_for_is_not_followed(model: Path) -> None:
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(content))
    assert make(model).digest == make().digest


def test_hub_source_gives_the_same_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer() as hub:
        hub.add("org/tiny", bundled_model("tiny-glm"))
        for name, value in hub.env(tmp_path / "hf").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        assert make("org/tiny").digest == make().digest


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b" \n\t\n", "holds no text"),
        (b"fine\nbad \xff\n", r"x\.txt:2: not UTF-8 text: byte 0xff"),
        (
            b"Three words only.",
            r"make 0 samples of 256; 128 are wanted. Lower --length to \d and --samples to 1, or give more text",
        ),
        (
            b"weasel " * 600,
            r"which make \d+ samples of 256; 128 are wanted. Lower --samples to \d+ or --length to \d+",
        ),
    ],
)
def test_bad_text(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=says):
        make(data=str(path))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not a line of JSON"),
        ("[" * 100_000, "not a line of JSON"),
        ("[1]", "not a document: a list"),
        (
            '{"content": "x", "id": 1}',
            "not a document: keys content, id; accepted: an object with either 'text' or 'messages', not both",
        ),
        ('{"text": "x", "messages": []}', "not a document: keys messages, text"),
        ('{"text": 3}', "'text' is a int"),
        ('{"text": "\\ud800"}', "lone surrogate"),
        ('{"messages": []}', "'messages' is not a chat"),
        ('{"messages": [{"role": "user"}]}', "'messages' is not a chat"),
        ('{"messages": {"role": "user", "content": "x"}}', "'messages' is not a chat"),
        ('{"messages": [{"role": "user", "content": "\\udfff"}]}', "refuses this chat"),
    ],
)
def test_bad_line_of_jsonl(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "Fine."}\n\n' + line + "\n")
    with pytest.raises(UsageError) as caught:
        make(data=str(path))
    assert says in str(caught.value) and f"{path}:3" in str(caught.value)


def test_bad_places(tmp_path: Path) -> None:
    for missing in (str(tmp_path / "missing.txt"), "calib/missing.txt", "./calib/missing", "missing", "a:b:c"):
        with pytest.raises(UsageError, match="no such file or directory"):
            make(data=missing)
    (tmp_path / "x.csv").write_text("a,b")
    with pytest.raises(UsageError, match=r"cannot calibrate with .*x\.csv"):
        make(data=str(tmp_path / "x.csv"))
    with pytest.raises(UsageError, match=r"x\.csv: is neither a \.txt nor a \.jsonl file"):
        make(data=str(tmp_path))
    for name, says in (("a", "is a link that leads nowhere"), ("b", "is a directory")):
        (tmp_path / name).mkdir()
        if name == "a":
            (tmp_path / name / "c.txt").symlink_to(tmp_path / "gone")
        else:
            (tmp_path / name / "c.txt").mkdir()
        with pytest.raises(UsageError, match=rf"c\.txt: {says}"):
            make(data=str(tmp_path / name))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no text"):
        make(data=str(tmp_path / "empty"))
    os.mkfifo(tmp_path / "empty" / "pipe.txt")
    with pytest.raises(UsageError, match="not a regular file"):
        make(data=str(tmp_path / "empty" / "pipe.txt"))


def test_more_text_than_anyone_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.calibration.texts.MAX_BYTES", 64)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x" * 40)
    with pytest.raises(UsageError, match="more than 0 MiB of text"):
        make(data=str(tmp_path))


def test_samples_longer_than_the_context() -> None:
    with pytest.raises(UsageError, match=r"--length: samples of 4,096 tokens.*at most 2,048"):
        make(length=4096, samples=1)


def test_a_source_without_a_usable_tokenizer(model: Path, tmp_path: Path) -> None:
    chat = jsonl(tmp_path / "chat.jsonl", {"messages": CHAT})
    (model / "chat_template.jinja").unlink()
    refuse(UsageError, "no chat template", model, data=chat)
    (model / "chat_template.jinja").write_text("{{ raise_exception('roles must dance') }}")
    refuse(UsageError, "roles must dance", model, data=chat)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    refuse(SourceError, "the model has 300", model)
    (model / "tokenizer.json").write_text("{}")
    refuse(SourceError, "cannot be read as a tokenizer", model)
    (model / "tokenizer.json").unlink()
    refuse(SourceError, "no tokenizer.json", model)


def refuse(kind: type[QuantkitError], says: str, source: Path, **section: Any) -> None:
    with pytest.raises(kind, match=says):
        make(source, **section)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        EnvironmentProblem, match=r"needs transformers.*pip install 'quantkit\[calibrate\]'.*--method mse"
    ):
        make()
