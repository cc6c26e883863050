"""A service over two fake workers, steered through a folder; nothing here waits for a clock, but with a limit."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from quantkit_serve.config import EngineConfig
from quantkit_serve.engine.loop import EngineService
from quantkit_serve.phase import Phase
from quantkit_serve.request import Output, Request
from quantkit_serve.split.config import SplitConfig
from quantkit_serve.split.engine import SplitEngine
from quantkit_serve.split.pair import Pair
from quantkit_serve.split.process import Opening
from tests.serve.engine.fake import WORDS, config, held
from tests.serve.split.fake_worker import FACTORY

THREADS = {Phase.PREFILL: 1, Phase.DECODE: 2}
LIMIT_S = 60.0


def split_config(**more: Any) -> SplitConfig:
    return SplitConfig(**{"threads": THREADS, **more})


def openings(folder: Path, page_size: int = 4, **of_phase: dict[str, Any]) -> dict[Phase, Opening]:
    """``decode={...}``: further arguments of that worker."""
    return {
        phase: Opening(
            FACTORY,
            {"folder": str(folder), "phase": phase.value, "page_size": page_size, **of_phase.get(phase.value, {})},
        )
        for phase in Phase
    }


class Split:
    """What a test gets."""

    def __init__(self, folder: Path, settings: EngineConfig, split: SplitConfig) -> None:
        self.folder = folder
        self.openings = openings(folder, settings.cache.page_size)
        self.pair = Pair(self.openings, split)
        self.core = SplitEngine(self.pair, settings, split, WORDS)
        self.service = EngineService(self.core)

    def pid(self, phase: Phase) -> int:
        found = self.pair.runners[phase].pid
        assert found is not None
        return found

    def hold(self, *names: str) -> None:
        for name in names:
            (self.folder / f"held-{name}").unlink(missing_ok=True)
            (self.folder / f"hold-{name}").touch()

    def let_go(self, *names: str) -> None:
        for name in names:
            (self.folder / f"hold-{name}").unlink()

    async def until_held(self, name: str) -> None:
        await until((self.folder / f"held-{name}").exists)

    def submit(self, one: Request) -> asyncio.Task[tuple[list[int], Output]]:
        return asyncio.create_task(self.collect(one))

    async def collect(self, one: Request) -> tuple[list[int], Output]:
        tokens: list[int] = []
        async for output in self.service.submit(one):
            tokens += output.token_ids
        return tokens, output


async def until(condition: Callable[[], object]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    await asyncio.wait_for(wait(), LIMIT_S)


def is_there(pid: int) -> bool:
    """Not a zombie either: those whose parent was killed are reaped by somebody else."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def segments() -> list[str]:
    """Of shared memory that have a name."""
    return [path.name for path in Path("/dev/shm").iterdir() if "quantkit" in path.name]


def descriptors() -> list[str]:
    """Of shared memory, in this process."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of the listing itself
            found.append(str(path.readlink()))
    return [target for target in found if "memfd:quantkit" in target]


def serve(
    folder: Path,
    test: Callable[[Split], Awaitable[None]],
    settings: EngineConfig | None = None,
    split: SplitConfig | None = None,
) -> None:
    async def run() -> None:
        found = Split(folder, settings or config(), split or split_config())
        await found.service.start()
        try:
            await asyncio.wait_for(test(found), LIMIT_S)
            with found.core.lock:
                found.core.pool.check_integrity(held(found.core))
        finally:
            pids = [runner.pid for runner in found.pair.runners.values()]
            await found.service.stop()
        assert not [pid for pid in pids if pid is not None and is_there(pid)]
        counts = found.core.pool.counts()
        assert counts.used == counts.quarantined == 0

    gc.collect()  # of earlier tests
    before = len(descriptors())
    asyncio.run(run())
    gc.collect()
    assert not segments() and len(descriptors()) <= before
