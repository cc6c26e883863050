"""Conversions by several processes: the same bytes, one voice, and what is left when one of them dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quantkit import api
from quantkit.artifact import verify_artifact
from quantkit.artifact.records import read_records
from quantkit.calibration.ranks import Ranks
from quantkit.checkpoint import open_checkpoint
from quantkit.convert import convert
from quantkit.errors import UsageError
from quantkit.launch import process_of_run
from quantkit.plan import build_plan
from quantkit.recipe import default_recipe
from tests.quantkit.convert.cases import core_digests
from tests.quantkit.convert.rank_driver import BATCH_TOKENS
from tests.quantkit.convert.test_calibrated import run

ROOT = Path(__file__).parents[3]
DRIVER = "tests.quantkit.convert.rank_driver"
OPTIONS: dict[str, Any] = {  # five batches, the last of one sample
    "method": "gptq+awq", "samples": 9, "length": 64, "layers": "1-2",
}  # fmt: skip
ARGUMENTS = (
    *("convert", "tiny-glm", "--method", "gptq+awq", "--samples", "9", "--length", "64", "--layers", "1-2"),
    *("-j", "1", "-o"),
)
MSE_LIMIT = 0.089  # between the largest error of layer 1 by mse and those of the other layers
NONE = ("none", 0, 0)


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """Loopback only, whatever the host's name resolves to."""
    return {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(size: int, *arguments: str, accident: tuple[str, int, int] = NONE, last: tuple[str, ...] = ()) -> Any:
    """Start ``size`` processes by hand, without a launcher that ends them; ``last``: options of the last one."""
    port = str(free_port())
    children = []
    for rank in range(size):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        own = last if rank == size - 1 else ()
        children.append(
            subprocess.Popen(
                [sys.executable, "-m", DRIVER, *map(str, accident), "--", *arguments, *own],
                env=environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **ranks), cwd=ROOT,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    found = []
    try:
        for child in children:
            out, err = child.communicate(timeout=200)
            found.append(Ended(child.returncode, out, err))
    except subprocess.TimeoutExpired:
        states = [child.poll() for child in children]
        for child in children:
            child.kill()
        pytest.fail(f"exit codes {states}, of the others their stacks: {[c.communicate()[1] for c in children]}")
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The conversion by one process."""
    out = tmp_path_factory.mktemp("alone") / "artifact"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantkit.calibration.stream.BATCH_TOKENS", BATCH_TOKENS)
        run("tiny-glm", out, jobs=1, **OPTIONS)
    return out


def test_four_processes_give_the_same_bytes(alone: Path, tmp_path: Path) -> None:
    ended = start(4, *ARGUMENTS, str(tmp_path / "out"))
    assert [e.code for e in ended] == [0] * 4, ended
    assert all(e.out == e.err == "" for e in ended[1:])
    assert core_digests(tmp_path / "out") == core_digests(alone)


def test_killed_processes_leave_what_any_number_resumes(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    ended = start(3, *ARGUMENTS, str(out), accident=("kill", 1, 1))
    assert [e.code for e in ended] == [4, -signal.SIGKILL, 4], ended
    said = [e.err for e in ended if "error:" in e.err]
    assert said == [ended[0].err]
    assert said[0].count("error:") == 1
    assert "another process of the run ended" in said[0] and "it resumes" in said[0]
    assert not out.exists()

    ended = start(2, *ARGUMENTS, str(out), accident=("kill", 0, 2))
    assert [e.code for e in ended] == [-signal.SIGKILL, 4], ended
    assert ended[1].err.count("error:") == 1 and "another process of the run ended" in ended[1].err

    monkeypatch.setattr("quantkit.calibration.stream.BATCH_TOKENS", BATCH_TOKENS)
    run("tiny-glm", out, jobs=1, **OPTIONS)
    assert core_digests(out) == core_digests(alone)


def test_an_error_of_one_is_said_once_by_the_first(tmp_path: Path) -> None:
    ended = start(2, *ARGUMENTS, str(tmp_path / "out"), "--json", accident=("fail", 1, 1))
    assert [e.code for e in ended] == [3, 3], ended
    assert ended[1].out == ended[1].err == ""
    assert ended[0].err.count("error:") == 1 and "model.layers.1.mlp.experts" in ended[0].err
    failure = json.loads(ended[0].out)
    assert (failure["exit_code"], failure["error"]["type"]) == (3, "SourceError")


def test_processes_that_were_given_different_work_stop(tmp_path: Path) -> None:
    ended = start(2, *ARGUMENTS, str(tmp_path / "out"), last=("--group-size", "64"))
    assert [e.code for e in ended] == [2, 2], ended
    assert "processes 0 and 1 differ in plan" in ended[0].err
    assert ended[1].err == ""
    assert not (tmp_path / "out.partial").exists()


def test_without_calibration_the_first_converts_and_the_others_wait(tmp_path: Path) -> None:
    ended = start(2, "convert", "tiny-glm", "--method", "rtn", "-o", str(tmp_path / "out"))
    assert [e.code for e in ended] == [0, 0], ended
    assert ended[1].out == ended[1].err == ""
    assert verify_artifact(tmp_path / "out").ok


def test_torchrun_gives_the_same_bytes_of_every_kind_of_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linears outside the experts, a multi-token-prediction layer, weights that are only rounded, retries, and a
    layer that is planned anew; through the launcher itself, with one document on stdout."""
    monkeypatch.setattr("quantkit.calibration.stream.BATCH_TOKENS", BATCH_TOKENS)
    recipe = default_recipe().with_options(
        **{**OPTIONS, "method": "gptq", "layers": "1-2,6"}, linears="all", mtp="quantize",
        overrides=[{"pattern": r"layers\.2\.(self_attn\.o_proj|mlp\.experts\.\d\.gate_proj)", "method": "rtn"}],
        budget={"max_relative_error": MSE_LIMIT, "action": ["retry", "keep-fp8"]},
    )  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(api.recipe_yaml(recipe))
    with open_checkpoint("tiny-glm") as checkpoint:
        alone = convert(build_plan(checkpoint, recipe), checkpoint, tmp_path / "alone", jobs=1).manifest
    assert [a.layer for a in alone.plan_amendments] == [1]
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", DRIVER, *map(str, NONE), "--",
         "convert", "tiny-glm", "--recipe", tmp_path / "recipe.yaml", "-o", out, "--json"],
        env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["artifact"] == str(out)
    assert done.stderr.count("converting tiny-glm into") == 1
    assert core_digests(out) == core_digests(tmp_path / "alone")
    assert verify_artifact(out).ok
    ways = {(r.decode.method, bool((r.decode.calibration or {}).get("retry"))) for r in read_records(out)}
    assert ways >= {("rtn", False), ("mse", False), ("gptq", True)}


def several(size: int) -> Ranks:
    ranks = Ranks()
    ranks.size = size
    return ranks


def test_experts_are_divided_evenly() -> None:
    assert several(2).owners([0, 0, 9000, 0, 0, 0], ()) == [0, 1, 0, 1, 1, 1]
    assert several(2).owners([5, 5, 5, 5], (0, 1, 2)) == [0, 0, 0, 0]
    assert Ranks().owners([3, 4], ()) == [0, 0]


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, (0, 1)),
        ({"RANK": "1"}, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "3"}, (1, 3)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (0, 1)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "a"}, (1, 2)),
    ],
)
def test_which_process_this_is(
    variables: dict[str, str], found: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert process_of_run() == found


@pytest.mark.parametrize("rank", ["x", "2", "-1"])
def test_numbers_that_are_none(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="RANK"):
        process_of_run()
