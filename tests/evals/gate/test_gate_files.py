"""Gate files: what is accepted, every mistake named at once, and what is refused before anything runs."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

import pytest

from quantkit.errors import UsageError
from quantkit_evals.configuration import Configuration
from quantkit_evals.gate import Gate, check_gate, find_gate, gate_names, load_gate
from tests.evals.runs import ACC, KL, PERPLEXITY, task

ROOT = Path(__file__).resolve().parents[3]
HEAD = "schema_version: 1\nname: mine\nrules:\n"
QUICK = [task("cloze"), task("fidelity", KL, PERPLEXITY)]


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "gate.yaml"
        path.write_text(text)
        return path

    return write


def test_bundled_gates_are_found_by_name_and_by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gate_names() == ["accuracy", "default", "strict"]
    monkeypatch.chdir(ROOT)
    for name in gate_names():
        gate = find_gate(name)
        assert gate == find_gate(f"evals/gates/{name}.yaml") == load_gate(Path("evals/gates") / f"{name}.yaml")
        assert gate.name == name
        assert gate.description
        assert gate.sha256 == sha256((ROOT / "evals" / "gates" / f"{name}.yaml").read_bytes()).hexdigest()
    for rule in (*find_gate("default").rules, *find_gate("strict").rules):
        assert rule.reason


def test_the_default_gate_decides_on_fidelity_and_only_reports_accuracy() -> None:
    gate = find_gate("default")
    assert {r.metric for r in gate.rules if r.required} == {"fidelity.kl", "fidelity.perplexity"}
    (reported,) = (r for r in gate.rules if not r.required)
    assert (reported.metric, reported.kind, reported.limit) == ("cloze.acc", "non_inferiority", 0.8)
    check_gate(gate, QUICK, [Configuration("dual", "fp8")])


def test_a_misspelt_name_gets_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no gate or file 'defalt'.*Did you mean 'default'"):
        find_gate("defalt")
    with pytest.raises(UsageError, match="no gate or file"):
        find_gate(str(tmp_path / "no.yaml"))
    with pytest.raises(UsageError, match="cannot be read"):
        load_gate(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an empty file"),
        ("- 1\n", "a list where a mapping"),
        ("schema_version: 1\nname: a\n", "rules: is missing"),
        ("schema_version: 1\nname: a\nrules: []\n", "it has no rules"),
        ("schema_version: 2\nname: a\nrules:\n  - {metric: a.b, max: 1}\n", "schema_version: 2 is not accepted"),
        (HEAD + "  - {metric: a.b}\n", "one limit is needed, 0 are given"),
        (HEAD + "  - {metric: a.b, max: 1, min: 0}\n", "one limit is needed, 2 are given"),
        (
            HEAD + "  - {metric: a.b, max_kl: 1, max: 1}\n",
            "line 4: rules.0.max_kl: unknown key. Did you",
        ),
        (HEAD + "  - {metric: a.b, max: .nan}\n", "rules.0.max"),
        (HEAD + "  - {metric: a.b, max: .inf}\n", "rules.0.max"),
        (HEAD + "  - {metric: a.b, non_inferiority: 0}\n", "greater than 0"),
        (HEAD + "  - {metric: acc, max: 1}\n", "rules.0.metric"),
        (HEAD + "  - {metric: a.b, max: 1, max: 2}\n", "duplicate key 'rules.0.max'"),
        (HEAD + "  - {metric: a.b, max: 1}\n  - {metric: a.b, max: 2}\n", "two rules give max of a.b"),
        (HEAD + "  - {metric: a.b, max: 1, required: false}\n", "no rule is required"),
        ("confidence: 95\n" + HEAD + "  - {metric: a.b, max: 1}\n", "confidence"),
        (HEAD + "  - &a {metric: a.b, max: 1}\n  - *a\n", "an alias repeats this mapping"),
        (HEAD + "  - {metric: a.b, max: 1\n", "not valid YAML"),
    ],
)
def test_files_that_are_no_gates(write, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        load_gate(write(text))
    assert caught.value.exit_code == 2
    assert "gate.yaml" in str(caught.value)


def test_all_mistakes_at_once(write) -> None:
    text = "schema_version: 1\nnaem: a\nconfidence: 2\nrules:\n  - {metric: a.b, limit: 3}\n"
    with pytest.raises(UsageError) as caught:
        load_gate(write(text))
    for part in ("problems:", "name: is missing", "line 2: naem: unknown key. Did you mean 'name'", "line 3",
                 "rules.0.limit: unknown key"):  # fmt: skip
        assert part in str(caught.value)


def gate(*rules: dict[str, object], **fields: object) -> Gate:
    return Gate.model_validate({"schema_version": 1, "name": "mine", "rules": list(rules), **fields})


def test_a_rule_of_what_is_not_measured() -> None:
    with pytest.raises(UsageError, match=r"2 problems: cloze.ac is not measured. Did you mean 'cloze.acc'.*mmlu"):
        misspelt = gate({"metric": "cloze.ac", "min": 1}, {"metric": "mmlu.acc", "min": 1, "required": False})
        check_gate(misspelt, QUICK)
    with pytest.raises(UsageError, match=r"is not measured.* Nothing is"):
        check_gate(gate({"metric": "cloze.acc", "min": 1}), [])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"metric": "cloze.acc", "max": 1}, "higher is better: give min"),
        ({"metric": "fidelity.kl", "min": 1}, "lower is better: give max"),
        ({"metric": "fidelity.kl", "non_inferiority": 1}, "compares both candidates already: give max"),
        ({"metric": "fidelity.kl", "max_ratio": 1}, "compares both candidates already"),
        ({"metric": "cloze.acc", "max_ratio": 1}, "max_ratio is for perplexities"),
        ({"metric": "fidelity.perplexity", "non_inferiority": 1}, "give max_ratio"),
    ],
)
def test_limits_that_a_metric_cannot_have(rule: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_gate(gate(rule), QUICK)


def test_patterns_hold_for_what_fits_and_may_fit_nothing() -> None:
    some = gate({"metric": "*", "min_recovery": 99}, {"metric": "*.exact_match", "non_inferiority": 1})
    check_gate(some, QUICK)
    with pytest.raises(UsageError, match="no required rule applies"):
        check_gate(gate({"metric": "*.exact_match", "non_inferiority": 1}), QUICK)
    with pytest.raises(UsageError, match="no required rule applies"):  # a rule that only reports decides nothing
        reporting = {"metric": "cloze.acc", "non_inferiority": 1, "required": False}
        check_gate(gate({"metric": "*.f1", "min": 1}, reporting), QUICK)
    check_gate(find_gate("accuracy"), [task("arc_challenge")])
    with pytest.raises(UsageError, match="no required rule applies"):
        check_gate(find_gate("accuracy"), [task("text", PERPLEXITY)])


@pytest.mark.parametrize(
    ("candidate", "refused"),
    [
        (Configuration("dual"), True),
        (Configuration("fp8", "fp8"), True),
        (Configuration("int4", "bf16"), False),
        (Configuration("fp8", "bf16"), False),
    ],
)
def test_figures_of_prefill_do_not_judge_what_decodes(candidate: Configuration, refused: bool) -> None:
    one = gate({"metric": "cloze.acc", "non_inferiority": 0.8})
    check_gate(one, [task("cloze", path="decode")], [candidate])
    check_gate(one, [task("cloze", path="generate"), task("other", path="prefill")], [candidate])
    if refused:
        with pytest.raises(UsageError, match=r"cloze\.acc would judge .* never enters decode"):
            check_gate(one, [task("cloze", path="prefill")], [candidate])
    else:
        check_gate(one, [task("cloze", path="prefill")], [candidate])


def test_metrics_of_lm_eval_with_filters_are_reached() -> None:
    strict = type(ACC)("exact_match,strict-match", "accuracy", True, "%")
    check_gate(find_gate("accuracy"), [task("gsm8k", strict, path="generate")])


def test_the_gate_accuracy_reaches_every_accuracy() -> None:
    from quantkit_evals.tasks.named import _RIGHT_OR_WRONG
    from quantkit_evals.tasks.source import METRIC

    names = {name for name, metric in METRIC.items() if metric.is_percent}
    names |= _RIGHT_OR_WRONG | {f"{name},flexible-extract" for name in _RIGHT_OR_WRONG}
    found = find_gate("accuracy")
    judged = {name for rule, name in found.applied(f"t.{name}" for name in names) if rule.required}
    assert judged == {f"t.{name}" for name in names}


@pytest.mark.parametrize("confidence", [0.9995, 0.9999])
def test_a_confidence_that_resamples_cannot_resolve_is_refused(tmp_path: Path, confidence: float) -> None:
    path = tmp_path / "gate.yaml"
    path.write_text(f"schema_version: 1\nname: g\nconfidence: {confidence}\nrules: [{{metric: a.acc, min: 1}}]\n")
    with pytest.raises(UsageError, match=r"confidence"):
        load_gate(path)
