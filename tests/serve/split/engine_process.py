"""A process with engines in several states, each with two workers; it says which, and waits to be killed.

python -m tests.serve.split.engine_process FOLDER
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from quantkit_serve.phase import Phase
from tests.serve.engine.fake import config, request
from tests.serve.split.harness import Split, split_config, until


async def started(folder: Path) -> Split:
    folder.mkdir()
    split = Split(folder, config(), split_config())
    await split.service.start()
    return split


async def main(folder: Path) -> None:
    idle, step, load = [await started(folder / name) for name in ("idle", "step", "load")]
    step.hold("decode")
    tasks = [step.submit(request("a", [4, 5, 6], 5))]
    await step.until_held("decode")
    step.hold("prefill")
    tasks.append(step.submit(request("b", [4, 5, 6], 5)))
    await step.until_held("prefill")
    pids = [split.pid(phase) for split in (idle, step) for phase in Phase]
    load.hold("load-decode")
    runner = load.pair.runners[Phase.DECODE]
    assert runner._process is not None
    runner._process.kill()
    await load.until_held("load-decode")
    await until(lambda: runner._starting)
    assert runner._starting is not None
    print(*pids, load.pid(Phase.PREFILL), runner._starting.pid, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
