"""The parts an artifact is written with: canonical JSON, shards, journal, placement, attachments, reports."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import threading
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from quantkit.artifact import Artifact, add_attachment, verify_artifact
from quantkit.artifact.attachments.report_html import bar_chart
from quantkit.artifact.canonical import canonical_json, hash_file, round_figure, tensor_root
from quantkit.artifact.durable import write_file
from quantkit.artifact.journal import Journal
from quantkit.artifact.place import Way, choose_way, place_file
from quantkit.artifact.shard import ShardWriter
from quantkit.checkpoint.tensor import TensorInfo
from quantkit.errors import ArtifactError, EnvironmentProblem, SourceError, UsageError
from quantkit.safetensors_header import file_order
from quantkit.scheme import OutputTensor
from tests.builders import write_moe
from tests.quantkit.convert.cases import run

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=20,
)


# canonical


@given(JSON)
def test_canonical_json_round_trips_and_ignores_order(value: Any) -> None:
    data = canonical_json(value)
    assert json.loads(data.decode("utf-8", "surrogatepass")) == value
    if isinstance(value, dict):
        assert canonical_json(dict(reversed(value.items()))) == data


def test_canonical_json_refuses_nan() -> None:
    with pytest.raises(ValueError):
        canonical_json({"x": float("nan")})


def test_tensor_root_is_the_documented_digest() -> None:
    """By hand, as docs/format.md describes it: sorted lines, one JSON array each."""
    tensors = [("b", "F32", (2,), "11"), ("a\n", "I8", (), "22")]
    lines = sorted([b'["b","F32",[2],"11"]\n', b'["a\\n","I8",[],"22"]\n'])
    assert tensor_root(tensors) == hashlib.sha256(b"".join(lines)).hexdigest()
    assert tensor_root(reversed(tensors)) == tensor_root(tensors)
    assert tensor_root(tensors[:1]) != tensor_root(tensors)


@given(st.floats(min_value=1e-12, max_value=1e12))
def test_figures_are_stable(value: float) -> None:
    assert round_figure(round_figure(value)) == round_figure(value)
    assert abs(round_figure(value) - value) <= 5e-6 * value


# shards

TENSORS = file_order([
    OutputTensor("b", "U8", (5,)), OutputTensor("n", "I64", (2,)), OutputTensor("e", "F32", (0, 4)),
    OutputTensor("f", "F32", (3, 2)),
])  # fmt: skip
ARRAYS = {
    "b": np.arange(5, dtype=np.uint8), "n": np.array([7, -1]), "e": np.zeros((0, 4), np.float32),
    "f": np.arange(6, dtype=np.float32).reshape(3, 2),
}  # fmt: skip


def fill(writer: ShardWriter, names: tuple[str, ...] = ("b", "n", "e", "f")) -> dict[str, str]:
    digests = {}
    for name in names:
        sink = writer.sink(name)
        data = ARRAYS[name].tobytes()
        sink.write(data[:3])
        sink.write(data[3:])
        digests[name] = sink.digest()
    return digests


def test_shard_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    writer = ShardWriter(path, TENSORS)
    assert not path.exists() and writer.unfinished.stat().st_size == writer.nbytes
    digests = fill(writer)
    digest = writer.finish()
    assert not writer.unfinished.exists()
    assert (digest.nbytes, digest.sha256) == (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    for name, array in load_file(path).items():
        assert np.array_equal(array, ARRAYS[name]) and array.dtype == ARRAYS[name].dtype
        assert digests[name] == hashlib.sha256(array.tobytes()).hexdigest()


def test_shard_from_many_threads(tmp_path: Path) -> None:
    tensors = [OutputTensor(f"t{i}", "U8", (50_000,)) for i in range(24)]
    writer = ShardWriter(tmp_path / "s.safetensors", tensors)

    def write(number: int) -> None:
        sink = writer.sink(f"t{number}")
        for _ in range(50):
            sink.write(bytes([number]) * 1000)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.finish()
    assert all((array == int(name[1:])).all() for name, array in load_file(tmp_path / "s.safetensors").items())


def test_shard_continues(tmp_path: Path) -> None:
    first = ShardWriter(tmp_path / "s.safetensors", TENSORS)
    digests = fill(first, ("b", "f"))
    first.close()
    second = ShardWriter(tmp_path / "s.safetensors", TENSORS)
    assert second.resumed and second.rehash("f") == digests["f"]
    assert second.rehash("n") != hashlib.sha256(ARRAYS["n"].tobytes()).hexdigest()
    second.close()
    other = ShardWriter(tmp_path / "s.safetensors", TENSORS[:2])
    assert not other.resumed
    other.close()


def test_sink_wants_exactly_its_bytes(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "s.safetensors", TENSORS)
    sink = writer.sink("b")
    sink.write(b"1234")
    with pytest.raises(RuntimeError, match="4 of 5"):
        sink.digest()
    with pytest.raises(RuntimeError, match="more bytes"):
        sink.write(b"56")
    writer.close()


def test_write_file_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "f", b"old")

    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(EnvironmentProblem, match="no space left"):
        write_file(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old"


# journal

MARK = {"kind": "start", "plan_id": "p", "checkpoint": "c", "version": "1"}


def test_journal_remembers(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", MARK)
    journal.append({"kind": "a", "n": 1})
    journal.append({"kind": "b"})
    journal.close()
    again = Journal(tmp_path / "j", MARK)
    assert again.entries == [{"kind": "a", "n": 1}, {"kind": "b"}]
    again.close()


@pytest.mark.parametrize("torn", [b"{", b'{"kind":"c"}', b"\0\0\0\n", b"[1]\n", b'{"kind":\n{"kind":"x"}\n'])
def test_journal_drops_a_torn_end_for_good(tmp_path: Path, torn: bytes) -> None:
    for _ in range(2):
        journal = Journal(tmp_path / "j", MARK)
        if not journal.entries:
            journal.append({"kind": "a"})
        assert journal.entries in ([], [{"kind": "a"}])
        journal.close()
        with open(tmp_path / "j", "ab") as handle:
            handle.write(torn)
    journal = Journal(tmp_path / "j", MARK)
    journal.append({"kind": "next"})
    journal.close()
    assert Journal(tmp_path / "j", MARK).entries == [{"kind": "a"}, {"kind": "next"}]


def test_journal_of_another_run(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", MARK)
    journal.close()
    Journal(tmp_path / "j", MARK | {"plan_id": "q"}).close()  # nothing was done: no obstacle
    journal = Journal(tmp_path / "j", MARK)
    journal.append({"kind": "a"})
    journal.close()
    for key, say in (("plan_id", "plan"), ("checkpoint", "source"), ("version", "version of quantkit")):
        with pytest.raises(ArtifactError, match=f"another {say}"):
            Journal(tmp_path / "j", MARK | {key: "other"})


def _hold(path: Path, ready: Any, done: Any) -> None:
    journal = Journal(path, MARK)
    ready.set()
    done.wait(20)
    journal.close()


def test_journal_locks_across_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path / "j", ready, done))
    other.start()
    try:
        assert ready.wait(20)
        with pytest.raises(EnvironmentProblem, match="another quantkit process"):
            Journal(tmp_path / "j", MARK)
    finally:
        done.set()
        other.join()
    Journal(tmp_path / "j", MARK).close()


# placement


@pytest.fixture
def file(tmp_path: Path) -> tuple[Path, list[TensorInfo], dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    arrays = {f"t{i}": rng.integers(0, 255, size, dtype=np.uint8) for i, size in enumerate((70, 0, 3, 5000, 1))}
    path = tmp_path / "src.safetensors"
    save_file(arrays, path)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    infos = [
        TensorInfo(name, "U8", tuple(entry["shape"]), path.name, 8 + size + entry["data_offsets"][0],
                   entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in header.items()
    ]  # fmt: skip
    return path, infos, arrays


@pytest.mark.parametrize("read_bytes", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("way", [Way.COPY, Way.CLONE, Way.HARDLINK, Way.REFERENCE])
def test_placed_file(
    file: Any, tmp_path: Path, way: Way, read_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests are right wherever the pieces of the read fall."""
    monkeypatch.setattr("quantkit.artifact.place.READ_BYTES", read_bytes)
    path, infos, arrays = file
    target = None if way is Way.REFERENCE else tmp_path / "placed"
    seen: list[int] = []
    placed = place_file(path, target, way, infos, seen.append)
    assert placed.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert placed.tensors == {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}
    assert sum(seen) == placed.nbytes == path.stat().st_size
    if target:
        assert target.read_bytes() == path.read_bytes()
        assert target.samefile(path) == (way is Way.HARDLINK)


def test_placed_file_that_is_too_short(file: Any, tmp_path: Path) -> None:
    path, infos, _ = file
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(SourceError, match="beyond the end"):
        place_file(path, tmp_path / "placed", Way.COPY, infos, lambda count: None)
    assert not (tmp_path / "placed").exists()


def test_ways(file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file[0]
    link = tmp_path / "snapshot"
    link.symlink_to(path)
    assert choose_way("auto", link, tmp_path, content_addressed=True) is Way.HARDLINK
    assert choose_way("auto", path, tmp_path, content_addressed=False) in (Way.CLONE, Way.COPY)
    assert choose_way("link", path, tmp_path, content_addressed=False) is Way.HARDLINK
    assert choose_way("copy", path, tmp_path, content_addressed=True) is Way.COPY
    assert choose_way("reference", path, tmp_path, content_addressed=True) is Way.REFERENCE
    monkeypatch.setattr("quantkit.artifact.place._can_clone", lambda source, target: True)
    assert choose_way("auto", path, tmp_path, content_addressed=False) is Way.CLONE
    shm = Path("/dev/shm")
    if shm.is_dir() and shm.stat().st_dev != tmp_path.stat().st_dev:
        assert choose_way("auto", path, shm, content_addressed=True) is Way.COPY
        with pytest.raises(UsageError, match="cross file systems"):
            choose_way("link", path, shm, content_addressed=True)


# attachments


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    run(write_moe(folder / "model", "glm_moe_dsa"), folder / "out")
    return folder / "out"


def test_attachments_are_added_and_never_change_the_core(made: Path) -> None:
    before = hash_file(made / "manifest.json")
    with Artifact.open(made) as artifact:
        add_attachment(artifact, "evals/fidelity.json", b"{}")
        with pytest.raises(UsageError, match="exists"):
            add_attachment(artifact, "evals/fidelity.json", b"{}")
        add_attachment(artifact, "evals/fidelity.json", b'{"kl":1}', replace=True)
        add_attachment(artifact, "README.md", b"# card", root=True, replace=True)
    assert hash_file(made / "manifest.json") == before
    entries = json.loads((made / "attachments" / "attachments.json").read_text())["attachments"]
    assert [e["path"] for e in entries].count("attachments/evals/fidelity.json") == 2
    assert verify_artifact(made, quick=True).ok


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", "attachments.json", "a\\b", "x\0y"])
def test_attachment_names_stay_inside(made: Path, name: str) -> None:
    with pytest.raises(UsageError):
        add_attachment(made, name, b"")


def test_provenance_is_slsa(made: Path) -> None:
    statement = json.loads((made / "attachments" / "provenance.intoto.json").read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert statement["subject"][0]["digest"]["sha256"] == hash_file(made / "manifest.json")[0]
    build = statement["predicate"]["buildDefinition"]
    assert {d["name"] for d in build["resolvedDependencies"]} == set(Artifact.open(made).manifest.source.files)
    # in-toto attestation, field_types.md, Timestamp: RFC 3339 in the UTC timezone ("Z")
    finished = statement["predicate"]["runDetails"]["metadata"]["finishedOn"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", finished)


def test_report_is_self_contained(made: Path) -> None:
    html = (made / "attachments" / "report.html").read_text()
    assert html.count("<svg") == 2
    assert not any(word in html for word in ("http://", "https://", "<script", "src=", "@import", "url("))
    report = json.loads((made / "attachments" / "report.json").read_text())
    errors = report["errors"]["decode"]
    assert list(errors["by_projection"]) == ["down_proj", "gate_proj", "up_proj"]
    assert errors["all"]["weights"] == 12 and 0.05 < errors["all"]["rms"] <= errors["all"]["max"] < 0.12
    assert len(errors["worst"]) == 12
    for svg in html.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + svg.split("</svg>")[0] + "</svg>")


def test_chart_escapes_names() -> None:
    chart = bar_chart({'<b>"&': {"rms": 0.1, "max": 0.2, "weights": 1}}, "layer")
    assert "<b>" not in chart and ElementTree.fromstring(chart).tag == "svg"


def test_model_card(tmp_path: Path) -> None:
    source = write_moe(tmp_path / "model", "qwen3_moe")
    run(source, tmp_path / "out", repo="Qwen/Qwen3-30B-A3B-FP8")
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'base_model: "Qwen/Qwen3-30B-A3B-FP8"\nbase_model_relation: quantized' in card
    assert "| `decode/` |" in card and "%" in card and str(tmp_path) not in card
