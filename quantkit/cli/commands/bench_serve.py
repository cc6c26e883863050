"""``quantkit bench serve``: what does a server reach under load?"""

from __future__ import annotations

from typing import Any

import click

from ..console import Console
from ..lazy import Example, command
from ..options import Numbers, OutputPath, output_options


@command(
    "serve",
    Example("one, four and sixteen requests at a time",
            "quantkit bench serve --url http://127.0.0.1:8000 --concurrency 1,4,16"),
    Example("requests at random times, two and four per second, with cost and a plot",
            "quantkit bench serve --url http://127.0.0.1:8000 --rate 2,4 --price-per-hour 3.50 --plot load.svg"),
    Example("a server without /tokenize",
            "quantkit bench serve --url http://host:8000 --prompts random --vocab-size 32000 --json"),
    short_help="Put load on a server; throughput, latency, cost.",
)  # fmt: skip
@click.option("--url", required=True, metavar="URL", help="The server, for example http://127.0.0.1:8000.")
@click.option("--model", metavar="NAME", help="Model to ask for (default: the one that the server has).")
@click.option("--concurrency", type=Numbers(int), metavar="N,N", help="Levels: requests at a time (default: 1).")
@click.option(
    "--rate",
    type=Numbers(float),
    metavar="R,R",
    help="Levels instead: requests per second, sent at random times however many are under way.",
)
@click.option(
    "--num-prompts",
    type=click.IntRange(min=1),
    metavar="N",
    default=64,
    help="Requests of a level (default: 64).",
)
@click.option(
    "--input-len", type=click.IntRange(min=1), metavar="N", default=256, help="Tokens of a prompt (default: 256)."
)
@click.option(
    "--output-len",
    type=click.IntRange(min=1),
    metavar="N",
    default=128,
    help="Tokens of an answer (default: 128).",
)
@click.option(
    "--stop-at-eos",
    "stops_at_eos",
    is_flag=True,
    help="Let answers end where the model ends them; also for servers that refuse ignore_eos.",
)
@click.option(
    "--prompts",
    type=click.Choice(["text", "random"]),
    default="text",
    help="Windows of a bundled text, tokenized by the server, or random token ids (default: text).",
)
@click.option(
    "--vocab-size", type=click.IntRange(min=1), metavar="N", help="With --prompts random: ids are below it."
)
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    metavar="N",
    default=2,
    help="Requests before each level that don't count (default: 2).",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    help="Chooses prompts and arrival times; a server may have the prompts of an earlier run with the same seed "
    "in its prefix cache (default: 0).",
)
@click.option(
    "--price-per-hour",
    type=click.FloatRange(min=0, min_open=True),
    metavar="PRICE",
    help="Of the machine, in any currency; gives the cost of a million tokens.",
)
@click.option(
    "--plot", type=OutputPath(dir_okay=False), metavar="FILE", help="Also write the figures as an SVG plot."
)
@output_options
@click.pass_context
def serve(ctx: click.Context, /, url: str, plot: str | None, out: Console, **options: Any) -> None:
    """Send completions to an OpenAI-compatible server, level by level: requests, output tokens and all tokens per
    second; time to first token, per output token, between tokens and end to end (mean, median, 95th and 99th
    percentile, defined as `vllm bench serve` defines them). Failed requests are counted and named.

    The environment variable QUANTKIT_API_KEY holds the server's API key, if it wants one. Exit code 1: a request
    failed.
    """
    from quantkit_serve.load import bench
    from quantkit_serve.load.plot import write_svg

    from ..show_load import failures, load

    result = bench.run(url, bench.LoadConfig.of(**options), plot=plot, say=out.say)
    out.result(result.to_json, lambda: load(result))
    out.warn(failures(result))
    if plot is not None:
        write_svg(result, plot)
        out.say(f"wrote {plot}")
    ctx.exit(1 if result.failed else 0)
