"""Options of ``quantkit eval``: what is asked, of whom, how it is judged, and where the report goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ..errors import QuantkitError, SaidElsewhere, UsageError
from .console import Console
from .options import Bytes, Decorator, OutputPath, stacked

if TYPE_CHECKING:
    from quantkit_evals.choice import Choice
    from quantkit_evals.report.report import Report
    from quantkit_evals.session import Settings

F = TypeVar("F", bound=Callable[..., Any])

_TASKS = (
    click.option(
        "--suite", metavar="NAME|FILE",
        help="Bundled suite (quick, standard, tools) or a YAML file with `tasks:` (default: quick, if no --task).",
    ),
    click.option(
        "--task", "names", multiple=True, metavar="NAME|FILE",
        help="A bundled task, a task file of yours, or any name that lm-eval knows; may be given several times.",
    ),
    click.option(
        "--limit", type=click.IntRange(min=1), metavar="N",
        help="Items of each task at most, spread evenly over it (default: all).",
    ),
    click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N",
                 help="Of few-shot examples, sampled answers and the bootstrap (default: 0)."),
    click.option("--chat", is_flag=True, help="Put prompts into the model's chat template."),
    click.option(
        "--cache", type=OutputPath(), metavar="DIR",
        help="Keep answers here (default: quantkit/evals in $XDG_CACHE_HOME or ~/.cache).",
    ),
    click.option("--no-cache", is_flag=True, help="Keep no answers, and use none that were kept."),
)  # fmt: skip
_CANDIDATES = (
    click.option(
        "--weights", type=click.Choice(["dual", "fp8", "int4"]), multiple=True,
        help="Weight set under test: fp8 and int4 for both phases, dual prefills on FP8 and decodes on INT4; may "
        "be given several times (default: dual; of a plain checkpoint what it has).",
    ),
    click.option(
        "--kv-dtype", type=click.Choice(["fp8", "bf16", "f32"]), multiple=True,
        help="KV pages under test, with each of the weights; f32 with --dtype float32 only (default: fp8).",
    ),
    click.option(
        "--path", type=click.Choice(["auto", "decode", "prefill"]), default="auto",
        help="How continuations are scored: token by token through decode, or all at once; auto is decode where "
        "dual weights or FP8 pages are under test (default: auto).",
    ),
    click.option(
        "--dtype", "compute", type=click.Choice(["bfloat16", "float32"]), default="bfloat16",
        help="Arithmetic of all candidates (default: bfloat16).",
    ),
    click.option(
        "--fp8-activations", type=click.Choice(["none", "dynamic128"]), default="none",
        help="As of `quantkit serve`, for all candidates (default: none).",
    ),
    click.option(
        "--kv-memory", type=Bytes(), default=1 << 30, help="Of each candidate's KV pages (default: 1GiB)."
    ),
    click.option(
        "--baseline", type=click.Path(), metavar="RUN|CHECKPOINT",
        help="Hold candidates against this run, or this checkpoint (default: the publisher's view of ARTIFACT).",
    ),
    click.option(
        "--endpoint", metavar="URL",
        help="Also a server with OpenAI's completions API, http://127.0.0.1:8000/v1; alone, unless --weights.",
    ),
    click.option(
        "--endpoint-model", metavar="NAME", help="What the endpoint calls the model (default: its first)."
    ),
    click.option(
        "--transformers", type=click.Path(), metavar="DIR",
        help="Also the model in this directory, run by transformers; alone, unless --weights.",
    ),
)  # fmt: skip
_JUDGE = (
    click.option(
        "--gate", metavar="NAME|FILE",
        help="Limits to hold: a bundled gate (default, strict, ...) or a YAML file; exit code 1 if one does not.",
    ),
    click.option(
        "--margin", type=click.FloatRange(0, 100, min_open=True), default=0.8, metavar="POINTS",
        help="Of non-inferiority of accuracies, where no gate says otherwise (default: 0.8).",
    ),
    click.option(
        "--confidence", type=click.FloatRange(0.5, 0.999), default=0.95, metavar="C",
        help="Of intervals, where no gate says otherwise (default: 0.95).",
    ),
    click.option(
        "--undecided", type=click.Choice(["fail", "pass"]), default="fail",
        help="Whether a required rule that the items can't decide fails the gate (default: fail).",
    ),
)  # fmt: skip
_REPORT = (
    click.option("--html", type=OutputPath(), metavar="FILE", help="Write the report as one page, with plots."),
    click.option("--junit", type=OutputPath(), metavar="FILE", help="Write JUnit XML, for a pipeline."),
    click.option("--markdown", type=OutputPath(), metavar="FILE", help="Write the report as Markdown."),
)  # fmt: skip


@dataclass(frozen=True)
class Asking:
    """What is asked."""

    suite: str | None
    names: tuple[str, ...]
    limit: int | None
    seed: int
    chat: bool
    cache: str | None
    no_cache: bool

    def parts(self) -> dict[str, Any]:
        """Fields of ``Settings``.

        Raises:
            UsageError: no such task, or options that contradict each other.
        """
        from quantkit_evals.evaluation import tasks_of
        from quantkit_evals.harness.cache import default_cache

        if self.cache is not None and self.no_cache:
            raise UsageError("keeps answers, --no-cache none", where="--cache", accepted="one of them")
        kept = None if self.no_cache else Path(self.cache) if self.cache else default_cache()
        return tasks_of(self.suite, self.names) | {
            "limit": self.limit, "seed": self.seed, "is_chat": self.chat, "cache": kept,
        }  # fmt: skip


@dataclass(frozen=True)
class Judging:
    """How it is judged."""

    gate: str | None
    margin: float
    confidence: float
    undecided: Any

    def settings(self, asking: Asking | None = None) -> Settings:
        """All of ``Settings``; without ``asking`` for runs that are there already."""
        from quantkit_evals.gate import find_gate
        from quantkit_evals.session import Settings

        return Settings(
            **(asking.parts() if asking else {"tasks": ()}),
            gate=None if self.gate is None else find_gate(self.gate),
            margin=self.margin / 100, confidence=self.confidence, undecided=self.undecided,
        )  # fmt: skip


@dataclass(frozen=True)
class Reporting:
    """Where the report goes."""

    html: str | None
    junit: str | None
    markdown: str | None

    def check(self) -> None:
        """That its files can be written, before anything is measured.

        Raises:
            UsageError: the directory of one is not there, or it is no file.
            EnvironmentProblem: the disk refuses.
        """
        from quantkit_evals.report.markdown import check_step_summary

        for option, path in (("--html", self.html), ("--junit", self.junit), ("--markdown", self.markdown)):
            if path is not None:
                _check_file(option, Path(path).absolute())
        check_step_summary()

    def finish(self, report: Report, out: Console, keeping: Sequence[Callable[[], list[str]]] = ()) -> int:
        """To stdout, then wherever it was asked to be kept, and to GitHub where this is one of its steps.

        The result comes first: a disk that is full by now takes no verdict along, nor its exit code.

        Args:
            keeping: what else writes something, and says what in lines.

        Returns:
            The exit code: 0 or 1.

        Raises:
            SaidElsewhere: something could not be written, and the verdict is a success.
        """
        from quantkit_evals.report import annotations
        from quantkit_evals.report.document import document

        from .boundary import describe
        from .show_eval import evaluation

        out.result(lambda: document(report), lambda: evaluation(report, verbose=out.verbose))
        if annotations.is_wanted():
            click.echo("\n".join(annotations.annotations(report)), err=True)  # stdout is the result's
        failed: list[Exception] = []
        for write in (*keeping, *self._writing(report)):
            try:
                for line in write():
                    out.say(line)
            except (QuantkitError, OSError) as error:  # said here: stdout has its one document already
                said = describe(error)
                out.error(said.what, said.where, said.accepted, said.hint)
                failed.append(error)
        if failed and report.is_success:
            raise SaidElsewhere(failed[0]) from None
        return 0 if report.is_success else 1

    def _writing(self, report: Report) -> Iterator[Callable[[], list[str]]]:
        """The files that were asked for, and the summary of a step of GitHub."""
        from quantkit.artifact.durable import disk_errors, write_file
        from quantkit_evals.report import html, junit, markdown

        def to(path: str, make: Callable[[], bytes]) -> list[str]:
            with disk_errors(Path(path)):
                write_file(Path(path), make())
            return [f"wrote {path}"]

        def summary() -> list[str]:
            markdown.append_step_summary(report)
            return []

        wanted: tuple[tuple[str | None, Callable[[], bytes]], ...] = (
            (self.html, lambda: html.html(report)),
            (self.junit, lambda: junit.junit_xml(report, made=datetime.now(UTC))),
            (self.markdown, lambda: markdown.markdown(report).encode()),
        )
        yield from (partial(to, path, make) for path, make in wanted if path is not None)
        yield summary


def _check_file(option: str, path: Path) -> None:
    """A rename puts it there, so that its directory must take one; a device would be replaced by a file."""
    from tempfile import TemporaryFile

    from quantkit.artifact.durable import disk_errors

    if not path.parent.is_dir():
        raise UsageError(f"no directory {path.parent}", where=option, hint="Make it first.")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is there and is no file", where=option, accepted="the name of a file")
    with disk_errors(path), TemporaryFile(dir=path.parent):
        pass


def task_options(function: F) -> F:
    """The command gets an ``Asking``."""
    return _grouped(function, _TASKS, "asking", lambda **values: Asking(**values))


def judge_options(function: F) -> F:
    """The command gets a ``Judging``."""
    return _grouped(function, _JUDGE, "judging", lambda **values: Judging(**values))


def report_options(function: F) -> F:
    """The command gets a ``Reporting``."""
    return _grouped(function, _REPORT, "reporting", lambda **values: Reporting(**values))


def candidate_options(function: F) -> F:
    """The command gets a function that makes the ``Choice``."""
    return _grouped(function, _CANDIDATES, "choice", lambda **values: lambda: _choice(**values))


def _choice(
    *, kv_memory: int, kv_dtype: Any, baseline: str | None, transformers: str | None, **same: Any
) -> Choice:
    from quantkit_evals.choice import Choice

    return Choice(
        **same, kv_bytes=kv_memory, kv_dtypes=kv_dtype,
        baseline=None if baseline is None else Path(baseline),
        transformers=None if transformers is None else Path(transformers),
    )  # fmt: skip


def _grouped(function: F, options: tuple[Any, ...], name: str, make: Callable[..., Any]) -> F:
    """The options as one argument ``name`` of the command."""
    names = [o.name for o in click.command(stacked(*options)(lambda: None)).params if o.name]

    @wraps(function)
    def grouped(*args: Any, **kwargs: Any) -> Any:
        values = {each: kwargs.pop(each) for each in names}
        return function(*args, **{name: make(**values)}, **kwargs)

    decorate: Decorator[Any] = stacked(*options)
    return cast(F, decorate(grouped))
