"""``quantkit completion``: the script that a shell sources."""

from __future__ import annotations

import click

from ..console import Console
from ..lazy import Example, command

_SHELLS = ("bash", "zsh", "fish")


@command(
    "completion",
    Example("bash, for this session", 'eval "$(quantkit completion bash)"'),
    Example("zsh, for good", "quantkit completion zsh > ~/.zfunc/_quantkit"),
    Example("fish, for good", "quantkit completion fish > ~/.config/fish/completions/quantkit.fish"),
    short_help="Print the completion script of a shell.",
)
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> None:
    """Print the completion script of a shell to stdout."""
    from click.shell_completion import get_completion_class

    from ..main import cli

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"This version of click has no completion for {shell}.")
    Console().raw(kind(cli, {}, "quantkit", "_QUANTKIT_COMPLETE").source())
