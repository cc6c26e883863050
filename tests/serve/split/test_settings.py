"""Thread budgets and shared memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from quantkit.errors import UsageError
from quantkit_serve.phase import Phase
from quantkit_serve.split.config import default_threads, parse_threads
from quantkit_serve.split.memory import SharedMemory
from tests.serve.split.harness import descriptors, segments


def test_thread_budgets() -> None:
    assert parse_threads("prefill=3,decode=2") == parse_threads(" decode=2 , prefill=3") == {
        Phase.PREFILL: 3, Phase.DECODE: 2,
    }  # fmt: skip
    for cores in range(1, 9):
        found = default_threads(cores)
        assert sum(found.values()) == max(cores, 2) and min(found.values()) >= 1


@pytest.mark.parametrize(
    "text",
    ["", "2", "prefill=1", "prefill=1,decode=0", "prefill=1,decode=-1", "prefill=1,prefill=1", "a=1,decode=1",
     "prefill=1,decode=1,decode=1", "prefill=1,decode=²", "prefill=1,decode=1.5"],
)  # fmt: skip
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--split-threads"):
        parse_threads(text)


def test_memory_is_shared_grows_and_has_no_name() -> None:
    gc.collect()  # of earlier tests
    before = len(descriptors())
    memory = SharedMemory.create("test")
    memory.resize(10_000)
    first = memory.map(5_000)
    code = (
        "import sys; from quantkit_serve.split.memory import SharedMemory; "
        "SharedMemory(int(sys.argv[1])).map(10_000)[4_999] = 7"
    )
    subprocess.run([sys.executable, "-c", code, str(memory.fd)], pass_fds=[memory.fd], check=True)
    assert first[4_999] == 7
    memory.resize(50_000)
    assert memory.map(50_000)[4_999] == 7
    memory.map(50_000)[0] = 9
    assert first[0] == 9
    with pytest.raises(ValueError, match="there are 50000"):
        memory.map(50_001)
    memory.seal()
    with pytest.raises(OSError):
        os.ftruncate(memory.fd, 100)
    memory.close()
    memory.close()
    assert first[0] == 9
    assert not segments() and len(descriptors()) == before + 1  # of the mapping that is in use
    del first
    assert len(descriptors()) == before
