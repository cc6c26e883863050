"""Tasks by lm-eval's names: what our records need of them, and one clear error where they can't be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
from lm_eval.tasks import TaskManager

from quantkit.errors import EnvironmentProblem, UsageError
from quantkit_evals.tasks import find, find_tasks, named

CODE = """
class Docs(list):
    features = {"passage": None, "question": None, "label": None}

def data(**_):
    rows = [("p", "q", 0), ("p", "r", 1), ("o", "q", 1), ("o", "q", 1)]
    return {"test": Docs({"passage": p, "question": q, "label": n} for p, q, n in rows)}

def gone(**_):
    raise ConnectionError("Couldn't reach 'x/y' on the Hub\\nand much more")

def package(**_):
    import a_package_that_is_not_there

def own(doc, results):
    return {"acc": 0.25}

def corpus(items):
    return 1.0
"""
CHOICE = """
custom_dataset: !function code.data
test_split: test
output_type: multiple_choice
doc_to_text: "{{passage}} {{question}}"
doc_to_choice: ["no", "yes"]
doc_to_target: label
"""
TASKS = {
    "own_choice": CHOICE + "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n",
    "own_fractions": CHOICE
    + "process_results: !function code.own\n"
    + "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n",
    "own_corpus": CHOICE
    + "metric_list: [{metric: mcc, aggregation: matthews_corrcoef, higher_is_better: true}]\n",
    "own_code": CHOICE + "unsafe_code: true\n",
    "own_gone": CHOICE.replace("code.data", "code.gone"),
    "own_package": CHOICE.replace("code.data", "code.package"),
    "own_generate": """
custom_dataset: !function code.data
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{passage}}"
generation_kwargs: {until: ["."]}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
filter_list:
  - {name: strict, filter: [{function: take_first}]}
  - {name: flexible, filter: [{function: take_first}]}
""",
    "own_rolling": """
custom_dataset: !function code.data
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{passage}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
""",
}
GROUP = "group: own_group\ntask: [own_choice, own_generate]\n"


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "code.py").write_text(CODE)
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{text}")
    (folder / "own_group.yaml").write_text(GROUP)
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(autouse=True)
def own_names(monkeypatch: pytest.MonkeyPatch, manager: TaskManager) -> None:
    monkeypatch.setattr(named, "_manager", lambda: manager)


def only(name: str) -> Any:
    (task,) = find_tasks([name])
    return task


def test_what_records_need() -> None:
    source = only("own_choice")
    task = source.lm_eval_task()
    assert [(m.name, m.kind, m.unit, m.is_higher_better) for m in task.metrics] == [("acc", "accuracy", "%", True)]
    assert (source.paths, source.num_items) == (("prefill", "decode"), 4)
    docs = list(task.eval_docs)
    assert len({task.item_id(doc) for doc in docs}) == 3  # the last two are equal
    clusters = [task.cluster_of(doc) for doc in docs]
    assert clusters[0] == clusters[1] != clusters[2] == clusters[3]  # by passage


def test_versions_are_the_same_in_every_process_and_differ_by_task() -> None:
    assert only("own_choice").version == only("own_choice").version
    assert only("own_choice").version != only("own_fractions").version
    assert " at 0x" not in named._ADDRESS.sub("", repr(object()))


def test_fractions_are_no_accuracy() -> None:
    assert [(metric.kind, metric.unit) for metric in only("own_fractions").metrics] == [("share", "%")]


def test_metrics_behind_filters() -> None:
    source = only("own_generate")
    assert [metric.name for metric in source.metrics] == ["exact_match", "exact_match,flexible"]
    assert source.paths == ("generate",)


def test_perplexities() -> None:
    assert [(m.name, m.kind, m.is_higher_better) for m in only("own_rolling").metrics] == [
        ("word_perplexity", "perplexity", False)
    ]


def test_groups_are_expanded() -> None:
    assert [task.name for task in find_tasks(["own_group"])] == ["own_choice", "own_generate"]


def test_examples_of_a_suite(tmp_path: Path) -> None:
    suite = tmp_path / "suite.yaml"
    suite.write_text("tasks: [{task: own_choice, num_fewshot: 2}]\n")
    (source,) = find_tasks([], suite=str(suite))
    assert source.lm_eval_task().get_config("num_fewshot") == 2
    assert source.version != only("own_choice").version


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("own_chioce", UsageError, "no task 'own_chioce'.*Did you mean 'own_choice'"),
        ("own_corpus", UsageError, "own_corpus: no metric of this task is a sum over its items.*mcc"),
        ("own_code", UsageError, "own_code: this task runs code that the model writes"),
        (
            "own_gone",
            EnvironmentProblem,
            "own_gone: its data can't be loaded: Couldn't reach 'x/y' on the Hub. It",
        ),
        ("own_package", EnvironmentProblem, "needs a_package_that_is_not_there, which is not installed"),
    ],
)
def test_what_can_not_be_run(name: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        find_tasks([name])
    assert "\n" not in str(caught.value)


def test_the_names_of_the_standard_suite_are_lm_evals() -> None:
    """Looked up where lm-eval keeps these tasks: an index of all 14,000 takes long."""
    folders = ("arc", "hellaswag", "mmlu/default", "gsm8k", "winogrande", "truthfulqa", "ifeval")
    root = Path(lm_eval.tasks.__file__).parent
    known = TaskManager(include_path=[str(root / folder) for folder in folders], include_defaults=False).all_tasks
    assert {entry.task for entry in find.read_suites().suites["standard"].tasks} <= set(known)
