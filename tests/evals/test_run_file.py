"""A run survives the disk unchanged, and nothing that is damaged is read as one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.errors import ArtifactError, EnvironmentProblem, UsageError
from quantkit_evals.run import CurvePoint, Run, Skipped
from quantkit_evals.run_file import is_run, read_run, write_run
from tests.evals.runs import ACC, KL, PERPLEXITY, items, run, task


@pytest.fixture
def whole() -> Run:
    curve = {"kl by position": (CurvePoint(0, 64, 0.1, 0.01), CurvePoint(64, 128, 1e-300, 0.0))}
    tasks = [
        task("cloze", ACC, skipped=(Skipped("i99", "2,100 tokens are more than the context of 2,048"),)),
        task("heldout", PERPLEXITY, KL, curves=curve),
    ]
    cloze = items("cloze", {"acc": [1, 0, 1]}, per_cluster=2)
    text = items(
        "heldout", {"perplexity": [101.5, 0.1 + 0.2], "kl": [0.25, 1 / 3]}, weights={"perplexity": [30, 31]}
    )
    cloze[0] = replace(cloze[0], item='ß "\n\u2028', context_tokens=17)
    return run("tiny", tasks, [*cloze, *text], versions={"quantkit": "0.1.0"})


def change_items(folder: Path, change: Callable[[list[Any]], None]) -> None:
    """Rewrites the records and makes ``run.json`` agree with them: what no digest can find."""
    records = [json.loads(line) for line in (folder / "items.jsonl").read_text().split("\n")[:-1]]
    change(records)
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    (folder / "items.jsonl").write_bytes(data)
    change_header(
        folder,
        lambda h: h.update(items={"count": len(records), "bytes": len(data), "sha256": sha256(data).hexdigest()}),
    )


def change_header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    header = json.loads((folder / "run.json").read_text())
    change(header)
    (folder / "run.json").write_text(json.dumps(header))


def test_a_run_comes_back_equal_with_the_same_bytes(whole: Run, tmp_path: Path) -> None:
    write_run(whole, tmp_path / "a" / "run")
    again = read_run(tmp_path / "a" / "run")
    assert again == whole
    write_run(again, tmp_path / "b")
    for name in ("run.json", "items.jsonl"):
        assert (tmp_path / "a" / "run" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_run_is_replaced_and_other_files_stay(whole: Run, tmp_path: Path) -> None:
    (tmp_path / "cache.sqlite").write_text("x")
    write_run(whole, tmp_path)
    write_run(replace(whole, items=whole.items[1:]), tmp_path)
    assert len(read_run(tmp_path).items) == len(whole.items) - 1
    assert {p.name for p in tmp_path.iterdir()} == {"cache.sqlite", "run.json", "items.jsonl"}


def test_while_it_is_written_the_folder_is_no_run(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the two files must not leave old figures beside new records."""
    write_run(whole, tmp_path)
    import quantkit_evals.run_file as module

    written = []

    def die(path: Path, data: bytes) -> None:
        written.append(path.name)
        if path.name == "run.json":
            raise KeyboardInterrupt
        path.write_bytes(data)

    monkeypatch.setattr(module, "write_file", die)
    with pytest.raises(KeyboardInterrupt):
        write_run(replace(whole, items=whole.items[1:]), tmp_path)
    assert written == ["items.jsonl", "run.json"]
    assert not is_run(tmp_path)
    with pytest.raises(UsageError, match="no run is here"):
        read_run(tmp_path)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, "1", True, None])
@pytest.mark.parametrize("which", ["values", "weights"])
def test_what_is_no_finite_number_is_neither_written_nor_read(
    whole: Run, tmp_path: Path, number: object, which: str
) -> None:
    write_run(whole, tmp_path)
    before = (tmp_path / "run.json").read_bytes()
    bad = replace(whole.items[-1], **{which: {**getattr(whole.items[-1], which), "perplexity": number}})
    with pytest.raises(ArtifactError, match="'perplexity' is no finite number"):
        write_run(replace(whole, items=(*whole.items[:-1], bad)), tmp_path)
    assert (tmp_path / "run.json").read_bytes() == before
    change_items(tmp_path, lambda records: records[-1].setdefault(which, {}).update(perplexity=number))
    with pytest.raises(ArtifactError, match=rf"items.jsonl:5.*{which}.perplexity"):
        read_run(tmp_path)


def test_numbers_too_large_for_a_float_are_refused(whole: Run, tmp_path: Path) -> None:
    write_run(whole, tmp_path)
    change_items(tmp_path, lambda records: records[-1]["values"].update(kl=10**400))
    with pytest.raises(ArtifactError, match=r"items\.jsonl:5"):
        read_run(tmp_path)


def test_no_folder_and_no_run_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        read_run(tmp_path / "nothing")
    with pytest.raises(UsageError, match=r"no run is here.*run\.json"):
        read_run(tmp_path)


def test_truncated_changed_and_missing_records(whole: Run, tmp_path: Path) -> None:
    write_run(whole, tmp_path)
    path = tmp_path / "items.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    with pytest.raises(ArtifactError, match="cut short"):
        read_run(tmp_path)
    path.write_bytes(data.replace(b"101.5", b"101.6"))
    with pytest.raises(ArtifactError, match="the records were changed"):
        read_run(tmp_path)
    path.unlink()
    with pytest.raises(ArtifactError, match="can't be read"):
        read_run(tmp_path)
    path.mkdir()
    with pytest.raises(ArtifactError, match="can't be read"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.append(r[0]), "occurs twice"),
        (lambda r: r[0].update(item="i99"), "occurs twice .*skipped"),
        (lambda r: r[0].update(task="other"), "belongs to the task 'other'"),
        (lambda r: r[0]["values"].update(exact=1), "'exact', which is no metric of the task"),
        (lambda r: r[0].update(weights={"exact": 1}), "'exact', which is no metric of the task"),
        (lambda r: r[0].update(values={}), "no value of 'acc'"),
        (lambda r: r[0]["values"].update(acc=0.5), "of value 0 or 1"),
        (lambda r: r[-1]["weights"].update(perplexity=0), "accepted: above 0"),
        (lambda r: r[0].pop("cluster"), "items.jsonl:1: cluster: is missing"),
        (lambda r: r[2].update(clusters="c"), "items.jsonl:3: clusters: unknown key. Did you mean 'cluster'"),
        (lambda r: r[0].update(prompt_sha256="abc"), "prompt_sha256"),
        (lambda r: r[0].update(context_tokens=-1), "context_tokens"),
        (lambda r: r[0].update(context_tokens=1.5), "context_tokens"),
        (lambda r: r.__setitem__(1, [1]), "items.jsonl:2"),
        (lambda r: r.__setitem__(1, None), "items.jsonl:2"),
    ],
)
def test_records_that_are_wrong_though_their_digest_fits(
    whole: Run, tmp_path: Path, change: Callable[[list[Any]], None], message: str
) -> None:
    write_run(whole, tmp_path)
    change_items(tmp_path, change)
    with pytest.raises(ArtifactError, match=message) as caught:
        read_run(tmp_path)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("line", [b'{"task":"a","task":"b"}', b"{", b"[" * 100_000, b"\xff", b"", b"NaN"])
def test_lines_that_are_no_records(whole: Run, tmp_path: Path, line: bytes) -> None:
    write_run(whole, tmp_path)
    data = (tmp_path / "items.jsonl").read_bytes() + line + b"\n"
    (tmp_path / "items.jsonl").write_bytes(data)
    entry = {"count": len(whole.items) + 1, "bytes": len(data), "sha256": sha256(data).hexdigest()}
    change_header(tmp_path, lambda h: h.update(items=entry))
    with pytest.raises(ArtifactError, match=r"items\.jsonl:6"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(format="other"), "no run of an evaluation"),
        (lambda h: h.update(format_version=2), "written in version 2 of the format; accepted: version 1"),
        (lambda h: h.update(format_version=True), "written in version True"),
        (lambda h: h.pop("format_version"), "written in version None"),
        (lambda h: h["candidate"].pop("label"), "no label"),
        (lambda h: h.update(task=[]), "task: unknown key. Did you mean 'tasks'"),
        (lambda h: h["tasks"].append(h["tasks"][0]), "two tasks are named 'cloze'"),
        (lambda h: h["tasks"][0]["metrics"].append(h["tasks"][0]["metrics"][0]), "two metrics are named 'acc'"),
        (lambda h: h["tasks"][0].update(metrics=[]), "no metric"),
        (lambda h: h["tasks"][0]["metrics"][0].update(kind="odd"), "kind: 'odd' is not accepted"),
        (lambda h: h["tasks"][1]["curves"]["kl by position"][0].update(stderr=math.nan), "stderr"),
        (lambda h: h["settings"].update(seed=math.nan), "settings: holds a number that is not finite"),
        (lambda h: h["candidate"].update(of=[{"n": -math.inf}]), "candidate: holds a number that is not finite"),
        (lambda h: h["candidate"].update(label="\ud800"), "candidate: holds half of a surrogate pair"),
        (lambda h: h["items"].update(count=4), "5 records where run.json says 4"),
        (lambda h: h["items"].update(count="5", bytes=None), "2 problems"),
    ],
)
def test_headers_that_are_wrong(
    whole: Run, tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    write_run(whole, tmp_path)
    change_header(tmp_path, change)
    with pytest.raises(ArtifactError, match=message):
        read_run(tmp_path)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_headers_that_are_none(whole: Run, tmp_path: Path, data: bytes) -> None:
    write_run(whole, tmp_path)
    (tmp_path / "run.json").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"run\.json"):
        read_run(tmp_path)


def test_what_json_cannot_hold_is_not_written(whole: Run, tmp_path: Path) -> None:
    for stated in ({"x": math.nan}, {"x": object()}, {"x": "\ud800"}):
        with pytest.raises(ArtifactError, match="can't be written"):
            write_run(replace(whole, settings=stated), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_place_that_refuses(whole: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="cannot write here"):
        write_run(whole, tmp_path / "file" / "run")


@pytest.fixture
def written(whole: Run, tmp_path: Path) -> dict[str, bytes]:
    write_run(whole, tmp_path)
    return {name: (tmp_path / name).read_bytes() for name in ("run.json", "items.jsonl")}


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_any_damage_is_an_error_of_ours_or_harmless(
    whole: Run, written: dict[str, bytes], tmp_path: Path, data: st.DataObject
) -> None:
    """Bytes cut out or put in anywhere, in either file: never another exception, never other records."""
    name = data.draw(st.sampled_from(sorted(written)))
    before = written[name]
    start = data.draw(st.integers(0, len(before)))
    stop = data.draw(st.integers(start, min(len(before), start + 40)))
    new = data.draw(st.sampled_from([b"", b"0", b"NaN", b'"', b"}", b"\xff", b"null", b"[" * 9, b"-1e999", b"\n"]))
    for path, content in {**written, name: before[:start] + new + before[stop:]}.items():
        (tmp_path / path).write_bytes(content)
    try:
        again = read_run(tmp_path)
    except (ArtifactError, UsageError):
        return
    assert again.items == whole.items
