"""Data sets of the Hub as calibration text, from a small Hub on loopback; the oracle: the same rows in a file."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quantkit.calibration.hub_texts import BYTES_PER_TOKEN, DatasetSpec, choose_files, parse_spec
from quantkit.calibration.samples import CalibrationSet, calibration_set
from quantkit.calibration.texts import Texts, read_texts
from quantkit.checkpoint import open_checkpoint
from quantkit.checkpoint.hub_errors import Retry
from quantkit.errors import EnvironmentProblem, QuantkitError, SourceError, UsageError
from quantkit.recipe.sections import CalibrationSection
from tests.hub_server import HubServer

NAME = "acme/chats"
ROWS = [
    {"prompt_id": str(i), "messages": [
        {"role": "user", "content": f"What is {i} and {i}?"},
        {"role": "assistant", "content": f"It is {2 * i}. " + "The weasel counts its eggs again. " * 5},
    ]}
    for i in range(40)
]  # fmt: skip


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer(max_requests=300) as server:
        for key, value in server.env(tmp_path / "hf").items():
            monkeypatch.setenv(key, value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("quantkit.checkpoint.hub_dataset.Retry", lambda: Retry(2, 0.01, 0.02))
        yield server


def serve(hub: HubServer, folder: Path, files: dict[str, bytes], name: str = NAME, ref: str = "main") -> str:
    for file, content in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
    return hub.add(f"datasets/{name}", folder, ref=ref)


def samples(data: str, **section: Any) -> CalibrationSet:
    section = {"samples": 8, "length": 32, **section}
    with open_checkpoint("tiny-glm") as checkpoint:
        return calibration_set(CalibrationSection(data=data, **section), checkpoint)


def texts(data: str, tokens: int = 1000) -> Texts:
    return read_texts(data, tokens)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("a/b", ("a/b", "", None)), ("a/b:test", ("a/b", "", "test")), ("a/b@v1.0", ("a/b@v1.0", "", None)),
        ("a/b@refs/convert/parquet/x/train:train", ("a/b@refs/convert/parquet", "x/train", "train")),
        ("a/wiki/raw-v1:validation", ("a/wiki", "raw-v1", "validation")), ("hf://datasets/a/b", ("a/b", "", None)),
        ("a/b/data/train.jsonl", ("a/b", "data/train.jsonl", None)), ("a/b.c", ("a/b.c", "", None)),
        ("a/b.jsonl", None), ("name", None), ("./a/b", None), ("../b", None), ("/a/b", None), ("a/b:", None),
        ("a/b:x:y", None), ("https://x.y/z", None),
    ],
)  # fmt: skip
def test_names(data: str, expected: tuple[str, str, str | None] | None) -> None:
    assert parse_spec(data) == (None if expected is None else DatasetSpec(*expected))


@pytest.mark.parametrize(
    ("names", "data", "chosen"),
    [
        (["README.md", "train.jsonl", "test.jsonl"], "a/b", ["train.jsonl"]),
        (["train.jsonl", "test.jsonl"], "a/b:test", ["test.jsonl"]),
        (["d/train-00000-of-00002.parquet", "d/train-00001-of-00002.parquet", "d/test-00000-of-00001.parquet"],
         "a/b", ["d/train-00000-of-00002.parquet", "d/train-00001-of-00002.parquet"]),
        (["data/train_gen-00000-of-00001.parquet", "data/train_sft-00000-of-00001-0a1b.parquet"], "a/b:train_sft",
         ["data/train_sft-00000-of-00001-0a1b.parquet"]),
        (["en/c4-train.00000-of-01024.json.gz", "en/c4-validation.00000-of-00008.json.gz", "xx/c4-train.json.gz"],
         "a/b/en", ["en/c4-train.00000-of-01024.json.gz"]),
        (["x/train/0.txt", "x/train/1.txt", "x/eval/0.txt"], "a/b", ["x/train/0.txt", "x/train/1.txt"]),
        (["b.txt", "a.jsonl", "LICENSE.txt", "dataset_infos.json", ".x/c.txt"], "a/b", ["a.jsonl", "b.txt"]),
        (["one.jsonl", "two.jsonl", "train.jsonl"], "a/b/two.jsonl", ["two.jsonl"]),
    ],
)  # fmt: skip
def test_files_of_a_split(names: list[str], data: str, chosen: list[str]) -> None:
    spec = parse_spec(data)
    assert spec is not None and choose_files(tuple(sorted(names)), spec, "datasets/a/b") == chosen


@pytest.mark.parametrize(
    ("names", "data", "says"),
    [
        (["README.md", "x.csv"], "a/b", r"no file that is read; accepted: \.parquet"),
        (["train.jsonl"], "a/b/none", r"datasets/a/b/none: the data set has no file"),
        (["data/test_gen-00000-of-00001.parquet", "data/train_sft-00000-of-00001.parquet"], "a/b",
         r"no split 'train'; accepted: a/b:SPLIT with test_gen, train_sft"),
        (["validation.jsonl"], "a/b", "no split 'train'.*with validation"),
        (["train.jsonl"], "a/b:tests", "no split 'tests'.*with train"),
        (["one/train.jsonl", "two/train.jsonl"], "a/b", "in 2 folders; accepted: a/b/FOLDER:train with one, two"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_chosen(names: list[str], data: str, says: str) -> None:
    spec = parse_spec(data)
    assert spec is not None
    with pytest.raises(UsageError, match=says):
        choose_files(tuple(sorted(names)), spec, "datasets/a/b")


def test_same_samples_as_from_a_file(hub: HubServer, tmp_path: Path) -> None:
    serve(hub, tmp_path / "repo", {"train.jsonl": lines(ROWS), "test.jsonl": lines(ROWS[:1]), "README.md": b"#"})
    (tmp_path / "file.jsonl").write_bytes(lines([{"messages": row["messages"]} for row in ROWS]))
    found, expected = samples(NAME), samples(str(tmp_path / "file.jsonl"))
    assert (found.token_ids == expected.token_ids).all()
    assert found.description["text_sha256"] == [hashlib.sha256(lines(ROWS)).hexdigest()]
    assert NAME not in json.dumps(found.description)
    asked = {served.file for served in hub.seen("hub")}
    assert asked == {"train.jsonl"}


def test_files_in_order_until_there_is_enough(hub: HubServer, tmp_path: Path) -> None:
    one, two, three = lines([{"text": "x" * 3200}]), lines([{"text": "y" * 100}]), lines([{"text": "z"}])
    serve(hub, tmp_path / "repo", {"train-2.jsonl": two * 50, "train-1.jsonl": one, "train-3.jsonl": three})
    found = texts(NAME, 100 + 10)  # 3200 + 4 * 100 > 32 * 110 bytes
    assert BYTES_PER_TOKEN == 32 and [len(d.text or "") for d in found.documents] == [3200, 100, 100, 100, 100]
    assert found.sha256 == tuple(hashlib.sha256(content).hexdigest() for content in (one, two * 50))
    assert len(texts(NAME, 100).documents) == 1 and len(texts(NAME, 10**6).documents) == 52
    assert hub.served_bytes("train-3*") == len(three)


def test_gzip_and_text(hub: HubServer, tmp_path: Path) -> None:
    serve(hub, tmp_path / "repo", {
        "a.json.gz": gzip.compress(lines([{"text": "one", "url": "u"}, {"text": " "}])),
        "b.txt": "zwölf\r\n\r\nBoxkämpfer".encode(), "c.txt.gz": gzip.compress(b"three", mtime=0),
    })  # fmt: skip
    assert [d.text for d in texts(NAME).documents] == ["one", "zwölf\r\n\r\nBoxkämpfer", "three"]
    serve(hub, tmp_path / "long", {"train.txt": "ö".encode() * 100}, "acme/long")
    assert [d.text for d in texts("acme/long", 1).documents] == ["ö" * 16]
    (tmp_path / "odd").mkdir()
    serve(hub, tmp_path / "odd", {"train.txt": b"x" + "ö".encode() * 100}, "acme/odd")
    assert [d.text for d in texts("acme/odd", 1).documents] == ["x" + "ö" * 15]  # not half a character


def test_parquet(hub: HubServer, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "repo" / "data" / "train_sft-00000-of-00001.parquet"
    file.parent.mkdir(parents=True)
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), file, row_group_size=7)
    serve(hub, tmp_path / "lines", {"train.jsonl": lines(ROWS)}, "acme/lines")
    serve(hub, tmp_path / "repo", {})
    found = texts(f"{NAME}:train_sft")
    assert [d.messages for d in found.documents] == [d.messages for d in texts("acme/lines").documents]
    assert found.sha256 == (hashlib.sha256(file.read_bytes()).hexdigest(),)
    parquet.write_table(pyarrow.table({"text": ["a", "", "b"], "id": [1, 2, 3]}), file)
    serve(hub, tmp_path / "repo", {}, "acme/plain")
    assert [d.text for d in texts("acme/plain:train_sft").documents] == ["a", "b"]
    parquet.write_table(pyarrow.table({"instruction": ["a"], "output": ["b"]}), file)
    serve(hub, tmp_path / "repo", {}, "acme/other")
    refused("acme/other:train_sft", UsageError, "columns instruction, output; accepted: a column 'text' or")
    file.write_bytes(b"PAR1 no more")
    serve(hub, tmp_path / "repo", {}, "acme/broken")
    refused("acme/broken:train_sft", SourceError, "cannot be read as parquet")


def test_parquet_without_pyarrow(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(hub, tmp_path / "repo", {"train.parquet": b"PAR1"})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(NAME, EnvironmentProblem, r"train\.parquet: is a parquet file.*pip install 'quantkit\[parquet\]'")


def refused(data: str, kind: type[QuantkitError], says: str) -> None:
    with pytest.raises(QuantkitError, match=says) as caught:
        texts(data)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("file", "content", "kind", "says"),
    [
        ("train.jsonl", lines([{"instruction": "x", "output": "y"}]), UsageError,
         r"datasets/acme/chats/train\.jsonl:1: not a document: keys instruction, output"),
        ("train.json", b'[\n{"text": "x"}\n]', UsageError, r"train\.json:1: not a line of JSON"),
        ("train.jsonl", b'{"text": "x"}\n{"text": "\xff"}', UsageError, r"train\.jsonl:2: not UTF-8"),
        ("train.txt", b"fine \xff", UsageError, "not UTF-8"),
        ("train.jsonl", b"\n\n", UsageError, "hold no text"),
        ("train.jsonl.gz", b"plain", SourceError, "is damaged"),
        ("train.txt.gz", gzip.compress(b"x" * 999, mtime=0)[:-9], SourceError, "is damaged"),
    ],
)  # fmt: skip
def test_bad_files(
    file: str, content: bytes, kind: type[QuantkitError], says: str, hub: HubServer, tmp_path: Path
) -> None:
    serve(hub, tmp_path / "repo", {file: content})
    refused(NAME, kind, says)


def test_a_revision_is_that_commit_for_good(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = serve(hub, tmp_path / "one", {"train.jsonl": lines(ROWS)}, ref="v1")
    serve(hub, tmp_path / "two", {"train.jsonl": lines(ROWS[::-1])})
    old, new = samples(f"{NAME}@v1"), samples(NAME)
    assert old.digest != new.digest == samples(f"{NAME}@main").digest
    assert samples(f"{NAME}@{first}").digest == old.digest
    before = len(hub.requests)
    assert samples(f"{NAME}@{first}").digest == old.digest
    assert len(hub.requests) == before  # the commit, its listing and its file are in the cache
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert samples(NAME).digest == new.digest and samples(f"{NAME}@v1").digest == old.digest
    assert len(hub.requests) == before
    refused(
        f"{NAME}@v2",
        EnvironmentProblem,
        r"not in the local cache.*hf download acme/chats --revision v2 --repo-type",
    )


def test_offline_takes_nothing_else_instead(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(hub, tmp_path / "repo", {"train-1.jsonl": lines(ROWS), "train-2.jsonl": lines(ROWS)})
    texts(NAME, 10)  # one file is enough
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert len(texts(NAME, 10).sha256) == 1
    with pytest.raises(EnvironmentProblem, match=r"train-2\.jsonl not in the local cache"):
        texts(NAME, 10**6)


def test_what_the_hub_refuses(hub: HubServer, tmp_path: Path) -> None:
    serve(hub, tmp_path / "repo", {"train.jsonl": lines(ROWS)})
    refused("acme/none", UsageError, "--calibration: neither a file or directory here nor a data set on the Hub")
    refused(f"{NAME}@v9", SourceError, f"datasets/{NAME}@v9: the repository has no such revision")
    hub.gated.add(f"datasets/{NAME}")
    refused(NAME, SourceError, r"is gated.*https://huggingface\.co/datasets/acme/chats")
    hub.stop()
    refused(NAME, EnvironmentProblem, "the Hub cannot be reached")


def test_a_path_wins(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme" / "chats").mkdir(parents=True)
    (tmp_path / "acme" / "chats" / "a.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert [d.text for d in texts(NAME).documents] == ["mine"] and not hub.requests


def test_nothing_is_downloaded_for_a_plan(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    from quantkit.cli.main import main

    assert main(["plan", "tiny-glm", "--calibration", f"{NAME}:train_sft", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calibration"]["data"] == f"{NAME}:train_sft"
    assert not hub.requests
