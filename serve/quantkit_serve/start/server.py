"""A model behind a socket, until a signal comes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quantkit.units import format_bytes

from ..config import EngineConfig
from .assembly import assemble
from .servable import Servable

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..http.settings import HttpSettings
    from ..split.config import SplitConfig


@dataclass(frozen=True)
class Address:
    """Where to listen; port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 8000

    @property
    def is_loopback(self) -> bool:
        return self.host in ("127.0.0.1", "::1", "localhost")


def serve(
    model: Servable, config: EngineConfig, settings: HttpSettings, address: Address, *,
    split: SplitConfig | None = None, drain_s: float = 30.0, fault: str | None = None,
    say: Callable[[str], None] = lambda _: None, ready: Callable[[str], None] = lambda _: None,
) -> None:  # fmt: skip
    """Load a model and answer until a signal comes (``http.server``).

    Args:
        model, config, split, fault: see ``assemble``.
        drain_s: seconds that running requests get to finish.
        say: told what was loaded, and the address when it answers.
        ready: given the address when it answers.

    Raises:
        EnvironmentProblem: the address can't be used.
        UsageError, ArtifactError, SourceError, UnsupportedError: see ``assemble``.
    """
    from ..engine.loop import EngineService
    from ..http.app import create_app
    from ..http.server import Server, listen

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    with listen(address.host, address.port) as listening:
        made = assemble(model, config, split=split, fault=fault)
        for line in _facts(made.engine):
            say(line)
        if split is not None:
            threads = (f"{phase.value} with {count}" for phase, count in split.threads.items())
            say(f"two workers, {' and '.join(threads)} threads")
        fingerprint = settings.fingerprint or made.pair_id
        settings = replace(settings, fingerprint=fingerprint, is_local=address.is_loopback)
        app = create_app(EngineService(made.engine), made.tokenizer, settings)

        def on_ready(url: str) -> None:
            say(f"answering at {url}; Ctrl-C ends")
            ready(url)

        Server(app, drain_s=drain_s, log_level="warning").run_on(listening, on_ready)


def _facts(engine: Engine) -> Iterator[str]:
    facts, pool, cache = engine.facts, engine.pool, engine.config.cache
    weights = (f"{kind} {format_bytes(count)}" for kind, count in facts.memory.items() if count)
    yield f"weights: {', '.join(weights)}"
    yield (
        f"KV cache: {pool.num_pages * cache.page_size:,} tokens in {pool.num_pages:,} pages of {cache.page_size}, "
        f"{cache.kv_dtype}, {format_bytes(pool.num_pages * facts.page_bytes)}; context up to "
        f"{engine.limits.max_tokens(0):,} tokens"
    )
