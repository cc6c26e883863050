"""The one place where errors become a message and an exit code (ARCHITECTURE.md section 6).

======  =======================================================================================
 code    meaning
======  =======================================================================================
 0       done
 1       a gate failed or is undecided, or ``verify`` found something
 2       usage: option, argument, recipe or plan file
 3       checkpoint or artifact unsupported, incomplete or corrupt (``verify``: not an artifact)
 4       environment: disk, memory, network, device, missing extra
 70      a bug in quantkit (EX_SOFTWARE of sysexits.h); ``-v`` shows the traceback
 130     interrupted by Ctrl-C; a conversion can be resumed
 141     the reader of stdout went away (as a program killed by SIGPIPE; nothing is printed)
======  =======================================================================================

People read stderr. With ``--json`` stdout gets one object ``{"error": {...}, "exit_code": n}`` as well, so that
a script parses stdout in every case. The arguments are scanned for ``--json`` here since an error may come
before they are parsed.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import suppress
from typing import Any, NamedTuple

import click

from ..errors import QuantkitError, SaidElsewhere
from ..launch import process_of_run
from .console import Console, document

USAGE, ENVIRONMENT, BUG, INTERRUPTED, PIPE = 2, 4, 70, 130, 141
_ISSUE_HINT = "this is a bug in quantkit; run again with -v for the traceback and report it with `quantkit env`"


class Failure(NamedTuple):
    """What is said of an error: kind, exit code and the parts of the message."""

    kind: str
    exit_code: int
    what: str
    where: str | None = None
    accepted: str | None = None
    hint: str | None = None

    def to_json(self) -> dict[str, Any]:
        parts = {"type": self.kind, "message": self.what, "where": self.where, "accepted": self.accepted}
        return {"error": {**parts, "hint": self.hint}, "exit_code": self.exit_code}


def guarded(cli: click.Command, arguments: list[str]) -> int:
    """Run ``cli`` with ``arguments``; print whatever went wrong once and return the exit code."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    warnings.showwarning = _show_warning
    _open_closed_streams()
    streams = sys.stdout, sys.stderr
    try:
        code = cli.main(arguments, prog_name="quantkit", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except SystemExit as error:  # click leaves this way after shell completion, and on a closed pipe
        if sys.stdout is not streams[0]:  # which it tells by wrapping the streams
            sys.stdout, sys.stderr = streams
            _silence_stdout()
            return PIPE
        return error.code if isinstance(error.code, int) else 1
    except BrokenPipeError:
        _silence_stdout()
        return PIPE
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return USAGE
    except SaidElsewhere as error:
        return describe(error.error).exit_code
    except (Exception, KeyboardInterrupt) as error:
        failure = describe(error)
        if isinstance(error, click.UsageError) and _is_helper():
            return failure.exit_code
        _report(failure, error, as_json="--json" in options, verbose=_is_verbose(options))
        return failure.exit_code


def _is_helper() -> bool:
    """Whether another process of this run was started with the same arguments and says what is wrong with them."""
    with suppress(QuantkitError):
        return process_of_run()[0] > 0
    return False


def describe(error: BaseException) -> Failure:
    """The message and exit code of any exception."""
    kind = type(error).__name__
    match error:
        case QuantkitError():
            return Failure(kind, error.exit_code, error.what, error.where, error.accepted, error.hint)
        case click.ClickException():
            context = getattr(error, "ctx", None)
            hint = f"see `{context.command_path} --help`" if context else None
            return Failure(kind, error.exit_code, " ".join(error.format_message().split()), hint=hint)
        case KeyboardInterrupt() | click.Abort():
            return Failure("Interrupted", INTERRUPTED, "interrupted by the user")
        case MemoryError():
            hint = "free memory, or set a lower --max-memory or fewer workers (-j)"
            return Failure(kind, ENVIRONMENT, "out of memory", hint=hint)
        case OSError():
            where = str(error.filename) if error.filename is not None else None
            return Failure(kind, ENVIRONMENT, error.strerror or str(error) or kind, where, hint=_os_hint(error))
        case _:
            return Failure(kind, BUG, f"{kind}: {error}" if str(error) else kind, hint=_ISSUE_HINT)


def _os_hint(error: OSError) -> str | None:
    from errno import EACCES, EDQUOT, EMFILE, ENOSPC, EPERM, EROFS

    if error.errno in (ENOSPC, EDQUOT):
        return "free some space or choose another disk with -o, then run the same command again: it resumes"
    if error.errno in (EACCES, EPERM, EROFS):
        return "check the permissions, or write somewhere else with -o"
    if error.errno == EMFILE:
        return "raise the limit on open files (`ulimit -n`)"
    return None


def _report(failure: Failure, error: BaseException, *, as_json: bool, verbose: bool) -> None:
    if verbose and not isinstance(error, (click.ClickException, KeyboardInterrupt)):
        import traceback

        print("".join(traceback.format_exception(error)), file=sys.stderr, end="")
    try:
        Console().error(failure.what, failure.where, failure.accepted, failure.hint)
        if as_json:
            print(document(failure.to_json()))
        sys.stdout.flush()  # what is left in the buffer would fail again, unreported, when the interpreter ends
    except OSError:  # stdout itself is what failed: a closed pipe, a full disk
        _silence_stdout()


def _open_closed_streams() -> None:
    """A program started with stdout or stderr closed (``>&-``) does its work and says nothing."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - lives as long as the process


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Python warnings of libraries as one line of talk, without the source line that raised them."""
    Console().warn([str(message)])


def _is_verbose(options: list[str]) -> bool:
    return any(o == "--verbose" or (o[:1] == "-" and o[:2] != "--" and "v" in o[1:]) for o in options)


def _silence_stdout() -> None:
    # The interpreter flushes stdout at exit and would complain about the closed pipe once more.
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - lives as long as the process
