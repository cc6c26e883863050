"""Errors become one message and one exit code, in one place."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from quantkit import errors
from quantkit.cli.boundary import guarded
from quantkit.cli.options import output_options

from .conftest import Run, environment

RAISED = {
    "usage": (errors.UsageError("bad", where="--x", accepted="1 or 2", hint="Use 1."), 2),
    "recipe": (errors.RecipeError("bad"), 2),
    "source": (errors.SourceError("bad"), 3),
    "unsupported": (errors.UnsupportedError("bad"), 3),
    "artifact": (errors.ArtifactError("bad"), 3),
    "environment": (errors.EnvironmentProblem("bad"), 4),
    "gate": (errors.GateFailed("bad"), 1),
    "interrupted": (errors.Interrupted("bad"), 130),
    "click": (click.UsageError("bad"), 2),
    "click-parameter": (click.BadParameter("bad"), 2),
    "ctrl-c": (KeyboardInterrupt(), 130),
    "memory": (MemoryError(), 4),
    "disk full": (OSError(errno.ENOSPC, "No space left on device", "/d/f"), 4),
    "permission": (PermissionError(errno.EACCES, "Permission denied", "/d/f"), 4),
    "bug": (ZeroDivisionError("division by zero"), 70),
    "bug without words": (AssertionError(), 70),
}


def failing(error: BaseException) -> click.Command:
    @click.command()
    @output_options
    def command(out: object) -> None:
        raise error

    return command


@pytest.mark.parametrize("name", RAISED)
@pytest.mark.parametrize("flags", [[], ["--json"], ["-q"]], ids=str)
def test_exit_code_and_streams(name: str, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    error, code = RAISED[name]
    assert guarded(failing(error), flags) == code
    out, err = capsys.readouterr()
    assert err.strip().startswith("error: ")
    assert "Traceback" not in err
    if "--json" in flags:
        document = json.loads(out)
        assert document["exit_code"] == code
        assert set(document["error"]) == {"type", "message", "where", "accepted", "hint"}
        assert document["error"]["message"]
    else:
        assert out == ""


def test_every_error_class_is_in_the_table() -> None:
    def below(cls: type[Exception]) -> Iterator[type[Exception]]:
        for child in cls.__subclasses__():
            yield child
            yield from below(child)

    ours = {c for c in below(errors.QuantkitError) if c.__module__ == "quantkit.errors"}
    assert ours == {type(e) for e, _ in RAISED.values() if isinstance(e, errors.QuantkitError)}
    assert all(c.exit_code in (1, 2, 3, 4, 130) for c in ours if issubclass(c, errors.QuantkitError))


def test_all_parts_of_an_error_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    guarded(failing(RAISED["usage"][0]), ["--json"])
    out, err = capsys.readouterr()
    assert err == "error: --x: bad\n  accepted: 1 or 2\n  hint: Use 1.\n"
    assert json.loads(out)["error"] == {
        "type": "UsageError", "message": "bad", "where": "--x", "accepted": "1 or 2", "hint": "Use 1.",
    }  # fmt: skip


def test_a_bug_shows_its_traceback_with_v_only(capsys: pytest.CaptureFixture[str]) -> None:
    guarded(failing(RAISED["bug"][0]), [])
    assert "run again with -v" in capsys.readouterr().err
    guarded(failing(RAISED["bug"][0]), ["-v"])
    assert "Traceback" in capsys.readouterr().err


def test_disk_errors_name_the_file_and_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    guarded(failing(RAISED["disk full"][0]), [])
    err = capsys.readouterr().err
    assert "/d/f: No space left on device" in err and "resumes" in err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["pln"], 2, "Did you mean 'plan'?"),
        (["inspect", "tiny-glm", "--tensr", "x"], 2, "Did you mean '--tensor'?"),
        (["inspect", "tiny-gml"], 2, "Did you mean tiny-glm"),
        (["plan", "tiny-glm", "--recipe", "tiny-gml"], 2, "Did you mean 'tiny-glm'?"),
        (["convert"], 2, "there is no SOURCE"),
        (["convert", "--recipe", "tiny-glm"], 2, "To convert what tiny-glm names, give it as SOURCE"),
        (["plan", "tiny-glm", "--gpus", "4"], 2, "--gpus: there is no GPU"),
        (["plan", "tiny-glm", "--gpu", "h200", "--gpu-memory", "80GiB"], 2, "exclude each other"),
        (["convert", "tiny-glm", "--group-size", "16"], 2, "32"),
        (["convert", "tiny-glm", "--max-memory", "2G"], 2, "2GiB"),
        (["convert", "tiny-glm", "--layers", "5-3"], 2, "backwards"),
        (["convert", "--plan", "/nowhere.json", "--method", "rtn"], 2, "--method cannot change"),
        (["convert", "--plan", "/nowhere.json"], 2, "/nowhere.json"),
        (["recipes", "show"], 2, "NAME"),
        (["verify", "/nowhere"], 3, "no such directory"),
        (["inspect", "tiny-glm", "--tensor", "no.such"], 2, "no tensor 'no.such'"),
        (["--no-such"], 2, "No such option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_get_their_code_and_a_way_out(run: Run, arguments: list[str], code: int, said: str) -> None:
    result = run(*arguments)
    assert (result.code, result.out) == (code, "")
    assert said in result.err
    assert result.err.count("error: ") == 1


def test_no_command_shows_help_as_an_error(run: Run) -> None:
    result = run()
    assert (result.code, result.out) == (2, "")
    assert "Commands:" in result.err


@pytest.mark.parametrize(
    "arguments", [["inspect", "tiny-glm"], ["inspect", "tiny-glm", "--json"], ["--help"]], ids=str
)
def test_a_closed_pipe_is_quiet(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "quantkit", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment(), timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("arguments", [["env"], ["env", "--json"], ["--help"]], ids=str)
def test_a_full_disk_under_stdout_is_an_environment_problem(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "quantkit", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), timeout=60
        )
    assert done.returncode == 4
    assert done.stderr.startswith("error: No space left on device") and "Traceback" not in done.stderr


def test_wrong_kernels_are_an_environment_problem(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    import quantkit_kernels.registry as registry

    monkeypatch.setenv("QUANTKIT_KERNELS", "abacus")
    monkeypatch.setattr(registry, "_chosen", None)
    result = run("inspect", "tiny-glm", "--tensor", "lm_head")
    assert result.code == 4
    assert "abacus" in result.err
