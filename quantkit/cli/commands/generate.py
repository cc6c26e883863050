"""``quantkit generate``: one answer, without a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ..console import Console
from ..lazy import Example, command
from ..options import output_options
from ..serving import engine_options, found

if TYPE_CHECKING:
    from quantkit_serve.config import EngineConfig


@command(
    "generate",
    Example("greedy, with the bundled model", 'quantkit generate tiny-glm "Once upon a time"'),
    Example("sampled, the same every time", 'quantkit generate tiny-glm-w4 "Once" --temperature 0.8 --seed 7'),
    Example("what do the INT4 weights change?", 'quantkit generate tiny-glm-w4 "Once" --weights fp8'),
    short_help="Continue a prompt with an artifact, without a server.",
)
@click.argument("artifact", metavar="ARTIFACT|CHECKPOINT|MODEL")
@click.argument("prompt")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=128, metavar="N", help="Tokens at most (default: 128)."
)
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.0, metavar="T",
    help="0 takes the most likely token (default: 0).",
)  # fmt: skip
@click.option(
    "--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, metavar="P",
    help="Draw from the most likely tokens of this total probability (default: 1).",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Of the draws (default: a fresh one).")
@click.option("--stop", multiple=True, metavar="TEXT", help="Ends the answer; may be given several times.")
@click.option("--chat", is_flag=True, help="The prompt is a user's message, put into the model's chat template.")
@engine_options
@output_options
def generate(
    artifact: str, prompt: str, max_tokens: int, temperature: float, top_p: float, seed: int | None,
    stop: tuple[str, ...], chat: bool, engine: Callable[[], EngineConfig], out: Console,
) -> None:  # fmt: skip
    """Continue PROMPT with the model of an ARTIFACT: prefill on its FP8 view, decode on its INT4 view.

    The text goes to stdout as it comes, without the prompt. See `quantkit serve --help` for what may be served.
    """
    from quantkit_serve.start.extras import check_extras

    check_extras()
    from quantkit_serve.request import SamplingParams
    from quantkit_serve.start.assembly import assemble
    from quantkit_serve.start.generation import encode
    from quantkit_serve.start.generation import generate as run

    made = assemble(found(artifact, out), engine())
    tokens = encode(made, prompt, is_chat=chat)
    params = SamplingParams(max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop)
    answer = run(made, tokens, params, out.part)
    out.result(answer.to_json, lambda: ("\n",))
    rate = f"; {answer.tokens_per_s:.1f} tokens/s" if answer.tokens_per_s else ""
    out.say(f"{len(answer.token_ids)} tokens, ended by {answer.finish_reason}{rate}")
