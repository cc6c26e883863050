"""What is printed where: terminals, pipes, NO_COLOR, progress."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.cli.console import LINE_SECONDS, Console, Lines, Table, document

from .conftest import environment, process

ESCAPE = "\x1b["


def terminal(*arguments: str, **extra: str) -> tuple[int, str]:
    """Run the program on a pseudo-terminal (stdout and stderr); its exit code and all it printed."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "quantkit", *arguments]
    child = subprocess.Popen(command, stdout=follower, stderr=follower, stdin=follower, env=environment(**extra))
    os.close(follower)
    printed = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # Linux says EIO when the last writer is gone
            break
        if not chunk:
            break
        printed += chunk
    os.close(leader)
    return child.wait(), printed.decode()


def test_a_terminal_gets_colour_unless_it_says_no() -> None:
    code, printed = terminal("recipes", "show")
    assert code == 2 and ESCAPE in printed
    assert ESCAPE not in terminal("recipes", "show", NO_COLOR="1")[1]
    assert ESCAPE not in terminal("recipes", "show", TERM="dumb")[1]


def test_tables_fit_a_terminal_and_are_whole_off_it() -> None:
    code, narrow = terminal("recipes", COLUMNS="60", NO_COLOR="1")
    assert code == 0
    assert max(len(line) for line in narrow.splitlines()) <= 60
    wide = process("recipes")
    assert "Qwen/Qwen3-235B-A22B-FP8" in wide.out and ESCAPE not in wide.out
    assert all(line == line.rstrip() for line in wide.out.splitlines())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_lines_come_now_and_then() -> None:
    clock, stream = Clock(), io.StringIO()
    lines = Lines("converting", 1_000_000_000, stream=stream, clock=clock)
    for second in range(21):
        clock.now = float(second)
        lines(second * 50_000_000, f"shard {second}")
    printed = stream.getvalue().splitlines()
    assert len(printed) == 20 // LINE_SECONDS
    assert printed[1] == "converting: 500.0 MB of 1.00 GB (50 %), 50.0 MB/s, 10 s left, shard 10"


def test_speed_does_not_count_what_was_there_before() -> None:
    clock, stream = Clock(), io.StringIO()
    lines = Lines("converting", 1_000, stream=stream, clock=clock)
    lines(900)
    clock.now = 10.0
    lines(950)
    assert "95 %" in stream.getvalue() and "5 B/s" in stream.getvalue() and "10 s left" in stream.getvalue()


@pytest.mark.parametrize("is_bar", [False, True])
def test_what_strangers_call_their_models_is_no_control_of_the_log(
    is_bar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, stream, clock = "m\x1b[2J\n::error::x [/bold]", io.StringIO(), Clock()
    monkeypatch.setattr("sys.stderr", stream)
    if is_bar:
        monkeypatch.setenv("TERM", "xterm")
        stream.isatty = lambda: True  # type: ignore[method-assign]
        with Console().progress("work", 10) as report:
            report(5, name)
    else:
        lines = Lines("work", 10, stream=stream, clock=clock)
        lines(1)
        clock.now = 100.0
        lines(5, name)
    printed = stream.getvalue()
    assert "::error::x [/bold]" in printed and "\n::error" not in printed and "\x1b[2J" not in printed


def test_short_work_prints_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with Console().progress("work", 10) as report:
        report(10)
    assert capsys.readouterr() == ("", "")


def test_progress_goes_to_stderr_and_quiet_silences_it() -> None:
    code, printed = terminal("diff", "tiny-glm", "tiny-qwen3", "--json")
    assert code == 0 and "comparing" in printed
    assert "comparing" not in terminal("diff", "tiny-glm", "tiny-qwen3", "--json", "-q")[1]


def test_quiet_keeps_results_warnings_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    out = Console(quiet=True)
    out.say("talk")
    out.warn(["a warning"])
    out.error("an error")
    out.result(lambda: None, lambda: ["a result"])
    assert capsys.readouterr() == ("a result\n", "warning: a warning\nerror: an error\n")


def test_only_one_form_of_a_result_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    def never() -> object:
        raise AssertionError

    Console(as_json=True).result(lambda: {"a": 1}, never)  # type: ignore[arg-type]
    Console().result(never, lambda: [Table("T", ("x", ">y"), [["[b]", "1"]])])
    out = capsys.readouterr().out
    assert out.startswith('{\n  "a": 1\n}\n')
    assert "[b]" in out  # names are never read as markup


def test_documents_hold_no_numbers_that_json_has_not() -> None:
    with pytest.raises(ValueError, match="JSON"):
        document({"x": float("nan")})
    assert document([]) == "[]" and document({}) == "{}"
    table = {"a": {"fate_rows": None}, "fate_rows": [["x", {"y": [1]}], [2, None]], "z": [], "é": [[1]], "n": [1]}
    assert json.loads(document(table)) == table
    assert '"fate_rows": [\n    ["x", {"y": [1]}],\n    [2, null]\n  ],' in document(table)
    assert document({"p": Path("/x"), "ä": 1}) == '{\n  "p": "/x",\n  "ä": 1\n}'
