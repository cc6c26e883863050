"""kill -9 of each process in each state; stuck workers; workers that can't come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quantkit_serve.phase import Phase
from quantkit_serve.refusal import Unavailable
from quantkit_serve.request import FinishReason
from quantkit_serve.split import remote_runner
from tests.serve.engine.fake import alone, request
from tests.serve.split.harness import LIMIT_S, Split, is_there, segments, serve, split_config, until

A = request("a", [4, 5, 6, 7, 8], 9, ignore_eos=True)
B = request("b", [9, 8, 7], 6, ignore_eos=True)
C = request("c", [10, 11], 5, ignore_eos=True)


async def both_held(split: Split):  # type: ignore[no-untyped-def]
    """``a`` in the middle of a decode step, ``b`` in the middle of a prefill step."""
    split.hold("decode")
    one = split.submit(A)
    await split.until_held("decode")
    split.hold("prefill")
    other = split.submit(B)
    await split.until_held("prefill")
    return one, other


def kill(split: Split, phase: Phase) -> None:
    os.kill(split.pid(phase), signal.SIGKILL)


def test_the_decode_worker_dies_in_a_step(tmp_path: Path) -> None:
    async def test(split: Split) -> None:
        one, other = await both_held(split)
        split.hold("load-decode")
        kill(split, Phase.DECODE)
        tokens, last = await one
        assert last.finish is FinishReason.ERROR and tokens == alone(A)[: len(tokens)]
        assert last.error == "its step was lost: the decode worker was ended by SIGKILL"
        health = split.service.health()
        assert not health.is_ok and health.is_alive and health.reason == "the decode worker was ended by SIGKILL"
        split.let_go("prefill", "decode")
        await split.until_held("load-decode")
        third = split.submit(C)
        await until(lambda: len(split.core.scheduler.transit) == 2)  # prefill goes on; both wait for decode
        split.let_go("load-decode")
        assert (await other)[0] == alone(B) and (await third)[0] == alone(C)
        assert split.service.health().is_ok
        assert split.service.figures().worker_restarts == {"prefill": 0, "decode": 1}

    serve(tmp_path, test)


def test_the_prefill_worker_dies_in_a_step(tmp_path: Path) -> None:
    async def test(split: Split) -> None:
        one, other = await both_held(split)
        split.hold("load-prefill")
        kill(split, Phase.PREFILL)
        tokens, last = await other
        assert last.finish is FinishReason.ERROR and tokens == []
        assert last.error == "its step was lost: the prefill worker was ended by SIGKILL"
        split.let_go("prefill", "decode")
        third = split.submit(C)
        assert (await one)[0] == alone(A)  # while there is no prefill worker
        assert not split.service.health().is_ok
        split.let_go("load-prefill")
        assert (await third)[0] == alone(C)
        assert split.service.health().is_ok
        assert split.service.figures().worker_restarts == {"prefill": 1, "decode": 0}

    serve(tmp_path, test)


def test_workers_die_idle_and_while_they_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_runner, "_PAUSES_S", (0.0, 0.01))

    async def test(split: Split) -> None:
        split.hold("load-prefill")
        for phase in Phase:
            kill(split, phase)
        await split.until_held("load-prefill")
        loading = split.pair.runners[Phase.PREFILL]._starting
        assert loading is not None
        one = split.submit(A)
        split.hold("load-prefill")
        os.kill(loading.pid, signal.SIGKILL)
        await split.until_held("load-prefill")  # the next one
        assert "can't be started again: the prefill worker was ended by SIGKILL" in str(
            split.service.health().reason
        )
        split.let_go("load-prefill")
        assert (await one)[0] == alone(A)  # nobody's request was lost
        await until(lambda: split.service.health().is_ok)
        assert split.service.figures().worker_restarts == {"prefill": 1, "decode": 1}

    serve(tmp_path, test)


def test_a_stuck_worker_is_ended_and_replaced(tmp_path: Path) -> None:
    async def test(split: Split) -> None:
        one, other = await both_held(split)
        os.kill(split.pid(Phase.DECODE), signal.SIGSTOP)
        split.let_go("prefill", "decode")
        _, last = await one
        assert last.error == "its step was lost: the decode worker was stuck in a step for more than 3 s"
        assert (await other)[0] == alone(B)
        assert (await split.submit(A))[0] == alone(A)

    serve(tmp_path, test, split=split_config(step_limit_s=3.0))


def test_a_worker_that_fails_says_why(tmp_path: Path) -> None:
    async def test(split: Split) -> None:
        (tmp_path / "break-prefill").touch()
        _, last = await split.submit(A)
        assert last.error == "its step was lost: the prefill worker failed: RuntimeError: broken on purpose"
        (tmp_path / "break-prefill").unlink()
        assert (await split.submit(A))[0] == alone(A)

    serve(tmp_path, test)


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    async def test(split: Split) -> None:
        split.hold("load-decode")
        one = split.submit(A)
        kill(split, Phase.DECODE)
        _, last = await one
        assert last.finish is FinishReason.ERROR
        if last.error != "its step was lost: the decode worker was ended by SIGKILL":
            assert last.error == "the decode worker was ended by SIGKILL; it has not been back for 0.5 s"
        await until(lambda: split.core._given_up(Phase.DECODE))
        with pytest.raises(Unavailable, match="has not been back"):
            split.service.submit(B)
        split.let_go("load-decode")
        await until(lambda: split.service.health().is_ok)
        assert (await split.submit(B))[0] == alone(B)

    serve(tmp_path, test, split=split_config(return_limit_s=0.5))


def test_another_artifact_is_not_taken_for_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_runner, "_PAUSES_S", (0.0, 0.05))

    async def test(split: Split) -> None:
        arguments = split.openings[Phase.DECODE].arguments
        assert isinstance(arguments, dict)
        arguments["pair_id"] = "another"
        kill(split, Phase.DECODE)
        await until(lambda: "pair_id 'another'" in str(split.service.health().reason))
        one = split.submit(A)
        del arguments["pair_id"]
        assert (await one)[0] == alone(A)

    serve(tmp_path, test)


def test_stop_does_not_wait_for_a_step(tmp_path: Path) -> None:
    async def test(split: Split) -> None:
        one, other = await both_held(split)
        await split.service.stop()
        assert (await one)[1].finish is (await other)[1].finish is FinishReason.ABORT

    serve(tmp_path, test)


def test_workers_do_not_outlive_the_engine(tmp_path: Path) -> None:
    """Idle, in a step, and loading."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.serve.split.engine_process", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 6 and all(map(is_there, pids))
        process.kill()
    end = time.monotonic() + LIMIT_S
    while any(map(is_there, pids)):
        assert time.monotonic() < end
        time.sleep(0.002)
    assert not segments()
