"""Options that say how a model is served, the same for ``serve`` and ``generate``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from quantkit.errors import UsageError

from .console import Console
from .options import Bytes, Decorator, stacked

if TYPE_CHECKING:
    from quantkit_serve.config import EngineConfig
    from quantkit_serve.split.config import SplitConfig
    from quantkit_serve.start.servable import Servable

F = TypeVar("F", bound=Callable[..., Any])
_ON_OFF = click.Choice(["on", "off"])

_MODEL = (
    click.option(
        "--weights", type=click.Choice(["dual", "fp8", "int4"]), default="dual",
        help="dual: prefill on FP8, decode on INT4; fp8 or int4: one set for both phases (default: dual).",
    ),
    click.option(
        "--dtype", "compute", type=click.Choice(["bfloat16", "float32"]), default="bfloat16",
        help="Arithmetic: bfloat16 runs the kernels; float32 is slow and large, to compare with a reference "
        "(default: bfloat16).",
    ),
    click.option(
        "--fp8-activations", type=click.Choice(["none", "dynamic128"]), default="none",
        help="Round the inputs of FP8 linears to e4m3, 128 to a scale, as engines on GPUs do (default: none).",
    ),
    click.option(
        "--prefill-kv", type=click.Choice(["rounded", "fresh"]), default="rounded",
        help="A prompt's chunk attends to its own keys and values as the pages hold them, so that chunks and "
        "prefix hits change nothing, or in BF16 (default: rounded).",
    ),
    click.option(
        "--deterministic", is_flag=True,
        help="The bits of an answer depend on nothing but its own request; slower.",
    ),
    click.option(
        "--speculative", type=click.Choice(["mtp", "off"]), default="off",
        help="mtp: the model's multi-token-prediction layer proposes tokens, and a decode step computes several. "
        "Greedy answers are the same; requests that sample, have a grammar or penalties don't take part "
        "(default: off).",
    ),
    click.option(
        "--num-speculative-tokens", type=click.IntRange(1, 16), metavar="N",
        help="Tokens proposed at a time with --speculative mtp (default: 1).",
    ),
)  # fmt: skip
_CACHE = (
    click.option(
        "--kv-dtype", type=click.Choice(["fp8", "bf16", "f32"]),
        help="Of the KV pages; f32 with --dtype float32 only (default: fp8, with float32 arithmetic f32).",
    ),
    click.option("--kv-memory", type=Bytes(), default=1 << 30, help="Memory of the KV pages (default: 1GiB)."),
    click.option(
        "--page-size", type=click.IntRange(1, 1024), default=64, metavar="N",
        help="Tokens of a page (default: 64).",
    ),
    click.option(
        "--kv-tags", type=_ON_OFF, default="on",
        help="Check before every step that each page is still the request's own (default: on).",
    ),
    click.option(
        "--prefix-cache", type=_ON_OFF, default="on",
        help="Requests share the pages of equal prompts (default: on).",
    ),
    click.option(
        "--max-model-len", type=click.IntRange(min=2), metavar="N",
        help="Tokens of prompt and answer together (default: what the model was trained for).",
    ),
)  # fmt: skip
_SCHEDULER = (
    click.option(
        "--max-num-seqs", type=click.IntRange(min=1), default=64, metavar="N",
        help="Sequences that run at once (default: 64).",
    ),
    click.option(
        "--max-num-batched-tokens", type=click.IntRange(min=1), default=512, metavar="N",
        help="Prompt tokens of a prefill step; one of them is the longest wait between two tokens of an answer "
        "(default: 512).",
    ),
    click.option(
        "--max-waiting", type=click.IntRange(min=0), default=1024, metavar="N",
        help="Requests that may wait for room; more are answered with 429 (default: 1024).",
    ),
)  # fmt: skip


_SPLIT = (
    click.option(
        "--split", is_flag=True,
        help="Prefill and decode in a process each, at the same time, over one pool of pages in shared memory.",
    ),
    click.option(
        "--split-threads", metavar="prefill=N,decode=N",
        help="Threads of each process (default: the cores, divided).",
    ),
    click.option(
        "--split-canary", is_flag=True,
        help="At each hand-off, compare the bytes of the pages with what prefill left; a millisecond per MB.",
    ),
)  # fmt: skip


# What the engine calls a setting that it can't work with, where the option has another name than its dashes give.
_OPTION_OF = {"kv_bytes": "--kv-memory", "compute": "--dtype"} | {
    name: f"--{name.replace('_', '-')}"
    for name in (
        "weights", "fp8_activations", "kv_dtype", "page_size", "max_model_len", "max_num_seqs",
        "max_num_batched_tokens", "max_waiting", "num_speculative_tokens",
    )
}  # fmt: skip


def engine_options(function: F) -> F:
    """How model, cache and scheduler are set; the command gets a function that makes the ``EngineConfig``."""
    every = (*_MODEL, *_CACHE, *_SCHEDULER)
    names = [o.name for o in click.command(stacked(*every)(lambda: None)).params if o.name]

    @wraps(function)
    def with_engine(*args: Any, **kwargs: Any) -> Any:
        values = {name: kwargs.pop(name) for name in names}
        try:
            return function(*args, engine=lambda: engine_config(**values), **kwargs)
        except UsageError as error:
            option = _OPTION_OF.get(error.where or "")
            if option is None:
                raise
            raise UsageError(error.what, where=option, accepted=error.accepted, hint=error.hint) from error

    decorate: Decorator[Any] = stacked(*every)
    return cast(F, decorate(with_engine))


def engine_config(
    *, weights: Any, compute: Any, fp8_activations: Any, prefill_kv: Any, deterministic: bool, speculative: Any,
    num_speculative_tokens: int | None, kv_dtype: Any, kv_memory: int, page_size: int, kv_tags: str,
    prefix_cache: str, max_model_len: int | None, max_num_seqs: int, max_num_batched_tokens: int, max_waiting: int,
) -> EngineConfig:  # fmt: skip
    """The options as one frozen configuration.

    Raises:
        UsageError: an option of speculation without it.
    """
    if num_speculative_tokens is not None and speculative == "off":
        raise UsageError(
            "is for proposed tokens", where="--num-speculative-tokens", accepted="with --speculative mtp"
        )
    from quantkit_serve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig

    return EngineConfig(
        ModelConfig(
            weights=weights, compute=compute, prefill_kv=prefill_kv, fp8_activations=fp8_activations,
            deterministic=deterministic, speculative=speculative,
            num_speculative_tokens=num_speculative_tokens or 1,
        ),
        CacheConfig(
            kv_dtype=kv_dtype or ("f32" if compute == "float32" else "fp8"), page_size=page_size,
            kv_bytes=kv_memory, has_tags=kv_tags == "on", has_prefix_cache=prefix_cache == "on",
        ),
        SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_waiting=max_waiting,
            max_model_len=max_model_len,
        ),
    )  # fmt: skip


def split_options(function: F) -> F:
    """Whether there are two processes, and how; the command gets a function that makes the ``SplitConfig``."""

    @wraps(function)
    def with_split(*args: Any, split: bool, split_threads: str | None, split_canary: bool, **kwargs: Any) -> Any:
        return function(*args, split=lambda: split_config(split, split_threads, split_canary), **kwargs)

    decorate: Decorator[Any] = stacked(*_SPLIT)
    return cast(F, decorate(with_split))


def split_config(is_split: bool, threads: str | None, has_canary: bool) -> SplitConfig | None:
    """None: one process.

    Raises:
        UsageError: options of two processes for one, or threads that can't be.
    """
    if not is_split:
        for name, value in (("--split-threads", threads), ("--split-canary", has_canary)):
            if value:
                raise UsageError("is for two processes", where=name, accepted="with --split")
        return None
    from quantkit_serve.split.config import SplitConfig, default_threads, parse_threads

    return SplitConfig(default_threads() if threads is None else parse_threads(threads), has_canary=has_canary)


def found(source: str, out: Console) -> Servable:
    """The model that ``source`` stands for; a bundled model is converted the first time."""
    from quantkit_serve.start.servable import servable

    with out.progress("converting") as report:
        return servable(source, say=out.say, on_progress=lambda e: report(e.done_bytes, e.unit, e.total_bytes))
