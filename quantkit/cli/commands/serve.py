"""``quantkit serve``: the reference server."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..console import Console
from ..lazy import Example, command
from ..options import Bytes, output_options
from ..serving import engine_options, found, split_options

if TYPE_CHECKING:
    from quantkit_serve.config import EngineConfig
    from quantkit_serve.split.config import SplitConfig

FAULTS = ("free-early", "double-allocate", "remap", "stale-prefix", "late-write")


@command(
    "serve",
    Example("the bundled model, converted the first time", "quantkit serve tiny-glm"),
    Example("an artifact, for others on the network",
            "quantkit serve glm-5.2-w4 --host 0.0.0.0 --api-key-file keys.txt --kv-memory 200GiB"),
    Example("what do the INT4 weights gain?", "quantkit serve tiny-glm-w4 --weights fp8 --port 8001"),
    short_help="Serve an artifact: an OpenAI-compatible reference server.",
)  # fmt: skip
@click.argument("artifact", metavar="ARTIFACT|CHECKPOINT|MODEL")
@click.option("--host", default="127.0.0.1", help="Address to listen on (default: 127.0.0.1, this machine only).")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, metavar="N",
    help="Port; 0 takes a free one (default: 8000).",
)  # fmt: skip
@click.option(
    "--served-model-name", "names", multiple=True, metavar="NAME",
    help="What clients call the model; may be given several times (default: the directory's name).",
)  # fmt: skip
@engine_options
@split_options
@click.option(
    "--api-key-file", type=click.Path(), metavar="FILE",
    help="Keys that clients must send, one per line; also from $QUANTKIT_API_KEYS (default: none).",
)  # fmt: skip
@click.option(
    "--allow-origin", "origins", multiple=True, metavar="URL",
    help="Web pages from there may call, too; may be given several times (default: none).",
)  # fmt: skip
@click.option("--max-body", type=Bytes(), default=8 << 20, help="Largest body of a request (default: 8MiB).")
@click.option(
    "--request-timeout", type=click.FloatRange(min=0, min_open=True), metavar="S",
    help="Seconds that an answer may take, waiting included (default: any).",
)  # fmt: skip
@click.option(
    "--drain", type=click.FloatRange(min=0), default=30.0, metavar="S",
    help="Seconds that running requests get to finish after SIGTERM or Ctrl-C (default: 30).",
)  # fmt: skip
@click.option(
    "--inject-fault", "fault", type=click.Choice(FAULTS),
    help="For tests: break page ownership once, to see what finds it (docs/serving.md).",
)  # fmt: skip
@output_options
def serve(
    artifact: str, host: str, port: int, names: tuple[str, ...], engine: Callable[[], EngineConfig],
    split: Callable[[], SplitConfig | None], api_key_file: str | None,
    origins: tuple[str, ...], max_body: int, request_timeout: float | None, drain: float,
    fault: str | None, out: Console,
) -> None:  # fmt: skip
    """Serve an ARTIFACT over HTTP, prefill on its FP8 view and decode on its INT4 view, with a paged KV cache
    whose pages are checked before every step. A plain CHECKPOINT is served with --weights fp8; a bundled MODEL
    (tiny-glm, tiny-qwen3) is converted the first time.

    OpenAI's /v1/chat/completions and /v1/completions, /health, /metrics and a live page at /. This is a reference
    on one machine: vLLM and SGLang load the same artifact where one is not enough.
    """
    from quantkit_serve.start.extras import check_extras

    check_extras()
    from quantkit_serve.http.keys import read_api_keys
    from quantkit_serve.http.settings import HttpSettings
    from quantkit_serve.start.server import Address
    from quantkit_serve.start.server import serve as run

    keys = read_api_keys(os.environ, Path(api_key_file) if api_key_file is not None else None)
    address = Address(host, port)
    if not keys and not address.is_loopback:
        out.warn([f"anyone who reaches {host}:{port} can use this server: it asks for no key (--api-key-file)"])
    settings = HttpSettings(
        api_keys=keys, served_names=names, cors_origins=origins, max_body_bytes=max_body,
        request_timeout_s=request_timeout,
    )  # fmt: skip
    chosen = split()

    def ready(url: str) -> None:  # the one result of a server, which may have chosen its port
        out.result(lambda: {"url": url}, lambda: (url,) if out.quiet else ())

    run(
        found(artifact, out), engine(), settings, address, split=chosen, drain_s=drain, fault=fault, say=out.say,
        ready=ready,
    )  # fmt: skip
