"""Files of one's own: three lines are a task, and what can't be scored is one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import UsageError
from quantkit_evals.tasks import find_tasks
from quantkit_evals.tasks.answers import score

CHOICE = {"context": "One and", "choices": ["two", "three"], "answer": 0}
CLOZE = {"context": "One and", "target": "two"}


def write(folder: Path, yaml: str, *rows: Any, data: bytes | None = None) -> Path:
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
    (folder / "mine.jsonl").write_bytes(lines if data is None else data)
    path = folder / "mine.yaml"
    path.write_text(yaml, encoding="utf-8")
    return path


def find(path: Path) -> Any:
    (task,) = find_tasks([str(path)])
    return task


def error(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        find_tasks([str(path)])
    return str(caught.value).replace(str(path.parent) + "/", "")


@pytest.mark.parametrize(
    ("kind", "row", "metrics"),
    [
        ("choice", CHOICE, ["acc", "acc_norm"]),
        ("cloze", CLOZE, ["acc", "perplexity"]),
        ("perplexity", {"text": "One and two."}, ["word_perplexity", "byte_perplexity"]),
        ("generate", {"prompt": "One and", "target": "two"}, ["exact_match"]),
        ("generate", {"prompt": "One and", "json_schema": {"type": "integer"}}, ["valid"]),
        (
            "generate",
            {"prompt": "One", "json_schema": {"type": "object"}, "target": {"a": 1}},
            ["valid", "exact_match", "field_match"],
        ),
    ],
)
def test_two_lines_are_a_task(tmp_path: Path, kind: str, row: dict[str, Any], metrics: list[str]) -> None:
    task = find(write(tmp_path, f"kind: {kind}\ndata: mine.jsonl\n", row, row))
    assert task.name == "mine"
    assert [metric.name for metric in task.metrics] == metrics
    assert [item["id"] for item in task.items] == ["1", "2"] == [item["cluster"] for item in task.items]
    assert task.paths == (("generate",) if kind == "generate" else ("prefill", "decode"))


def test_fields_of_other_names_and_templates(tmp_path: Path) -> None:
    yaml = (
        "kind: choice\ndata: mine.jsonl\nname: other\nid: key\ncluster: doc\n"
        'context: "Question: {{question}}\\nAnswer:"\nchoices: ["{{a}}", "{{b}}!"]\nanswer: gold\n'
    )
    row = {"question": "Who?", "a": "me", "b": 7, "gold": "7!", "key": 12, "doc": "d"}
    task = find(write(tmp_path, yaml, row))
    assert task.name == "other"
    assert task.items == (
        {"id": "12", "cluster": "d", "context": "Question: Who?\nAnswer:", "choices": ["me", "7!"], "answer": 1},
    )


def test_a_template_is_not_read_again(tmp_path: Path) -> None:
    task = find(write(tmp_path, 'kind: perplexity\ndata: mine.jsonl\ntext: "{{a}}"', {"a": "{{b}}", "b": "no"}))
    assert task.items[0]["text"] == "{{b}}"


def test_json_in_a_template(tmp_path: Path) -> None:
    yaml = """kind: perplexity\ndata: mine.jsonl\ntext: 'As {"a": {"b": {{x}}}}, {{{x}}}, {{ x }}{"c": {}}'\n"""
    assert find(write(tmp_path, yaml, {"x": 1})).items[0]["text"] == 'As {"a": {"b": 1}}, {1}, 1{"c": {}}'


@pytest.mark.parametrize(
    ("target", "schema", "wanted"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        (5, {"type": "integer"}, 5),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        (5, {"type": "string"}, None),
        (True, {"type": "integer"}, None),
        ("five", {"type": "integer"}, None),
        ("NaN", {"type": "number"}, None),
    ],
)
def test_targets_under_a_schema(tmp_path: Path, target: Any, schema: Any, wanted: Any) -> None:
    """A text is a text where it may be one, as a right answer is."""
    row = {"prompt": "P", "json_schema": schema, "target": target}
    path = write(tmp_path, "kind: generate\ndata: mine.jsonl\n", row)
    if wanted is None:
        assert "mine.jsonl, item 1: the target does not follow the item's own schema" in error(path)
        return
    task = find(path)
    assert task.items[0]["target"] == wanted and type(task.items[0]["target"]) is type(wanted)
    right = score(task.items[0], json.dumps(wanted))
    assert set(right.values()) == {1}
    assert score(task.items[0], "null") == dict.fromkeys(right, 0)
    assert ("field_match" in {metric.name for metric in task.metrics}) == isinstance(wanted, dict)


def test_the_version_is_that_of_definition_and_data(tmp_path: Path) -> None:
    yaml = "kind: cloze\ndata: mine.jsonl\n"
    versions = {
        find(write(tmp_path, text, row)).version
        for text in (yaml, yaml + "delimiter: ''\n")
        for row in (CLOZE, CLOZE | {"target": "three"})
    }
    assert len(versions) == 4
    assert find(write(tmp_path, yaml, CLOZE)).version in versions


def test_all_errors_of_a_file_at_once_with_their_lines(tmp_path: Path) -> None:
    said = error(write(tmp_path, "kind: clozes\ndata: mine.jsonl\ntarge: x\nmax_tokens: 0\n", CLOZE))
    assert said.startswith("mine.yaml: 3 problems: ")
    assert "line 1: kind: 'clozes' is not accepted" in said
    assert "line 3: targe: unknown key. Did you mean 'target'?" in said
    assert "line 4: max_tokens" in said


@pytest.mark.parametrize(
    ("yaml", "says"),
    [
        ("data: mine.jsonl\n", "kind: is missing"),
        ("", "mine.yaml:1: an empty file where a mapping is expected"),
        ("kind: cloze\nkind: cloze\n", "mine.yaml:2: duplicate key 'kind'"),
        ("kind: cloze\ndata: ../mine.jsonl\n", "lies outside of the task's folder"),
        ("kind: cloze\ndata: /etc/passwd\n", "lies outside of the task's folder"),
        ("kind: cloze\ndata: none.jsonl\n", "mine.yaml: data: none.jsonl cannot be read: No such file"),
        ("kind: cloze\ndata: .\n", "cannot be read: Is a directory"),
        (
            "kind: cloze\ndata: mine.jsonl\nchoices: a\n",
            "a task of kind cloze has no choices; it has context, target",
        ),
        ("kind: cloze\ndata: mine.jsonl\nuntil: [x]\n", "a task of kind cloze has no until"),
        ("kind: cloze\ndata: mine.jsonl\nmetrics: [f1]\n", "no metric 'f1'; it has acc, perplexity"),
        ("kind: cloze\ndata: mine.jsonl\nmetrics: []\n", "metrics: is empty or has one twice"),
        ("kind: cloze\ndata: mine.jsonl\nname: a b\n", "name"),
        ("kind: cloze\ndata: mine.jsonl\ntarget: '{{tagret}}'\n", "mine.jsonl:1: has no field 'tagret'"),
        ("kind: choice\ndata: mine.jsonl\nchoices: ['{{target}}']\n", "two or more templates"),
        ("kind: cloze\ndata: mine.jsonl\ntarget: '{{target.text}}'\n", "'{{target.text}}' has braces"),
        ("kind: cloze\ndata: mine.jsonl\ncontext: 'Q: {{context|upper}}'\n", "'{{context|upper}}' has braces"),
        ("kind: cloze\ndata: mine.jsonl\ntarget: '{{target }'\n", "line 3: target: '{{target }' has braces that"),
        ("kind: cloze\ndata: mine.jsonl\ntarget: '{target}}'\n", "line 3: target: '{target}}' has braces that"),
        ("kind: choice\ndata: mine.jsonl\nchoices: ['{{target}}', '{{a b}}']\n", "'{{a b}}' has braces that"),
        ('kind: cloze\ndata: "m\\0.jsonl"\n', "mine.yaml: data: 'm\\x00.jsonl' is no file's name"),
    ],
)
def test_hostile_files(tmp_path: Path, yaml: str, says: str) -> None:
    assert says in error(write(tmp_path, yaml, CLOZE))


def test_data_behind_a_link_lies_outside(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "secret.jsonl").write_text(json.dumps(CLOZE))
    path = write(inner, "kind: cloze\ndata: link.jsonl\n", CLOZE)
    (inner / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    assert "lies outside" in error(path)


@pytest.mark.parametrize(
    ("kind", "rows", "says"),
    [
        ("cloze", (), "mine.jsonl: the task has no items"),
        ("cloze", ("", "  "), "mine.jsonl: the task has no items"),
        (
            "cloze",
            (CLOZE, {"context": "a", "target": ""}),
            "mine.jsonl:2: target is empty: there is nothing to score",
        ),
        ("cloze", ({"context": "a", "target": " \n"},), "target is empty"),
        ("cloze", ({"context": "", "target": "b"},), "context is empty"),
        ("cloze", (CLOZE, {"context": "a"}), "mine.jsonl:2: has no field 'target'; it has context"),
        ("cloze", ({"context": ["a"], "target": "b"},), 'context is ["a"]; accepted: a text'),
        ("cloze", ({"context": "a", "target": None},), "target is null; accepted: a text"),
        ("cloze", (CLOZE, '{"context": "a", '), "mine.jsonl:2: not JSON: "),
        ("cloze", (CLOZE, "", "[1]"), "mine.jsonl:3: is [1]; accepted: a JSON object"),
        ("cloze", ('{"context": "a", "context": "b"}',), "mine.jsonl:1: not JSON: a key is there twice"),
        ("cloze", ('{"context": "a", "target": NaN}',), "NaN is no JSON number"),
        ("cloze", ('{"context": "a", "target": "\\ud800"}',), "half of a surrogate pair"),
        ("cloze", ("[" * 100_000,), "mine.jsonl:1: not JSON"),
        ("cloze", (CLOZE | {"id": "x"}, CLOZE | {"id": "x"}), 'mine.jsonl:2: the id "x" is that of line 1, too'),
        ("cloze", (CLOZE | {"id": ""},), 'id is ""'),
        ("cloze", (CLOZE | {"cluster": {}},), "cluster is {}; accepted: a text or a whole number"),
        ("choice", (CHOICE, CHOICE | {"answer": 2}), "mine.jsonl:2: answer is 2; accepted: 0 to 1"),
        ("choice", (CHOICE | {"answer": -1},), "answer is -1"),
        ("choice", (CHOICE | {"answer": True},), "answer is true"),
        ("choice", (CHOICE | {"answer": "four"},), 'answer is "four"'),
        ("choice", (CHOICE | {"choices": ["two"]},), "there is a choice of 1; accepted: two or more"),
        ("choice", (CHOICE | {"choices": "two"},), 'choices is "two"; accepted: a list of texts'),
        ("choice", (CHOICE | {"choices": ["two", ""]},), "a choice is empty: there is nothing to score"),
        ("choice", (CHOICE | {"choices": ["two", "two"]},), "two choices are equal"),
        ("perplexity", ({"text": " "},), "text is empty"),
        ("generate", ({"prompt": "a"},), "neither a target nor a json_schema"),
        ("generate", ({"prompt": "a", "json_schema": 3},), "json_schema is 3"),
        ("generate", ({"prompt": "a", "json_schema": {"type": "text"}},), "is no JSON Schema"),
        ("generate", ({"prompt": "a", "json_schema": {"$ref": "http://x.invalid/s"}},), "is no JSON Schema"),
        (
            "generate",
            ({"prompt": "a", "json_schema": {"type": "object", "required": ["b"]}, "target": {"a": 1}},),
            "item 1: the target does not follow the item's own schema",
        ),
        (
            "generate",
            ({"prompt": "a", "target": "b"}, {"prompt": "a", "json_schema": {}}),
            "no metric can be made of all items",
        ),
    ],
)
def test_hostile_lines(tmp_path: Path, kind: str, rows: tuple[Any, ...], says: str) -> None:
    said = error(write(tmp_path, f"kind: {kind}\ndata: mine.jsonl\n", *rows))
    assert says in said
    assert "\n" not in said


def test_data_that_is_not_utf8(tmp_path: Path) -> None:
    good = json.dumps(CLOZE).encode()
    said = error(write(tmp_path, "kind: cloze\ndata: mine.jsonl\n", data=good + b'\n{"context": "\xff"}\n'))
    assert "mine.jsonl:2: not UTF-8 text: byte 0xff" in said


def test_names(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no tasks are named; accepted: .*cloze"):
        find_tasks([])
    with pytest.raises(UsageError, match="no such task file"):
        find_tasks([str(tmp_path / "none.yaml")])
    with pytest.raises(UsageError, match=r"no suite or file 'quik'; .* Did you mean 'quick'"):
        find_tasks([], suite="quik")
    own = write(tmp_path, "name: cloze\nkind: cloze\ndata: mine.jsonl\n", CLOZE)
    with pytest.raises(UsageError, match="two different tasks are called 'cloze'"):
        find_tasks(["cloze", str(own)])
    assert [task.name for task in find_tasks(["cloze", "copy", "cloze"])] == ["cloze", "copy"]


def test_a_suite_of_ones_own(tmp_path: Path) -> None:
    write(tmp_path, "kind: cloze\ndata: mine.jsonl\n", CLOZE)
    suite = tmp_path / "suite.yaml"
    suite.write_text("description: two\ntasks: [mine.yaml, copy]\n")
    assert [task.name for task in find_tasks(["cloze"], suite=str(suite))] == ["mine", "copy", "cloze"]
    suite.write_text("tasks: []\n")
    with pytest.raises(UsageError, match="tasks"):
        find_tasks([], suite=str(suite))
    suite.write_text("tasks: [{task: mine.yaml, num_fewshot: 2}]\n")
    with pytest.raises(UsageError, match="num_fewshot is for tasks of lm-eval"):
        find_tasks([], suite=str(suite))
    suite.write_text("tasks: [{tsk: mine.yaml}]\n")
    with pytest.raises(UsageError, match=r"Did you mean 'task'"):
        find_tasks([], suite=str(suite))
