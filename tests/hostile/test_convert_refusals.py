"""Conversions that must not happen or must stop: each with its exit code, and a message that names the way out."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quantkit.artifact import shard as shard_module
from quantkit.artifact import verify_artifact
from quantkit.convert import target as target_module
from quantkit.errors import EnvironmentProblem, SourceError, UsageError
from tests.builders import moe, write_checkpoint, write_moe
from tests.quantkit.convert.cases import core_digests, run

ROOT = Path(__file__).parents[2]
EXPERT = "model.layers.1.mlp.experts.2.up_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("source") / "model", "glm_moe_dsa")


@pytest.mark.parametrize("module", [EXPERT, "model.layers.0.self_attn.o_proj"])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_code(module: str, code: int, tmp_path: Path) -> None:
    """In a weight that is quantized and in one that is passed through."""
    tensors, config = moe("glm_moe_dsa")
    weight = tensors[f"{module}.weight"]
    data = bytearray(weight.data)
    data[5 * weight.shape[1] + 17] = code
    tensors[f"{module}.weight"] = type(weight)(weight.dtype, weight.shape, bytes(data))
    source = write_checkpoint(tmp_path / "model", tensors, config)
    with pytest.raises(SourceError, match="row 5, column 17") as caught:
        run(source, tmp_path / "out")
    assert caught.value.exit_code == 3 and f"{module}.weight" in str(caught.value.where)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_bad_scale(value: float, tmp_path: Path) -> None:
    tensors, config = moe("glm_moe_dsa")
    scale = tensors[f"{EXPERT}.weight_scale_inv"]
    data = np.frombuffer(scale.data, "<f4").copy()
    data[0] = value
    tensors[f"{EXPERT}.weight_scale_inv"] = type(scale)(scale.dtype, scale.shape, data.tobytes())
    source = write_checkpoint(tmp_path / "model", tensors, config)
    with pytest.raises(SourceError) as caught:
        run(source, tmp_path / "out")
    assert f"{EXPERT}.weight_scale_inv" in str(caught.value)


def test_nan_in_a_plain_weight(tmp_path: Path) -> None:
    tensors, config = moe("qwen3_moe", storage="bf16")
    weight = tensors[f"{EXPERT}.weight"]
    data = np.frombuffer(weight.data, "<u2").copy()
    data[weight.shape[1] * 3 + 4] = 0x7FC0
    tensors[f"{EXPERT}.weight"] = type(weight)(weight.dtype, weight.shape, data.tobytes())
    source = write_checkpoint(tmp_path / "model", tensors, config)
    with pytest.raises(SourceError, match="row 3, column 4"):
        run(source, tmp_path / "out", make_fp8=True)


def test_weight_of_zeros_converts(tmp_path: Path) -> None:
    tensors, config = moe("glm_moe_dsa")
    weight = tensors[f"{EXPERT}.weight"]
    tensors[f"{EXPERT}.weight"] = type(weight)(weight.dtype, weight.shape, bytes(len(weight.data)))
    source = write_checkpoint(tmp_path / "model", tensors, config)
    artifact = run(source, tmp_path / "out")
    assert not artifact.decode[EXPERT].dequantize().any()
    assert verify_artifact(tmp_path / "out").ok


def test_source_truncated_after_planning(tmp_path: Path) -> None:
    source = write_moe(tmp_path / "model", "qwen3_moe")

    def cut(event: object) -> None:
        for path in source.glob("*.safetensors"):
            os.truncate(path, path.stat().st_size - 300)

    with pytest.raises(SourceError):
        run(source, tmp_path / "out", on_progress=cut, jobs=1)
    assert not (tmp_path / "out").exists()


def test_source_changed_under_way(tmp_path: Path) -> None:
    source = write_moe(tmp_path / "model", "qwen3_moe")
    shard = sorted(source.glob("*.safetensors"))[0]
    times = shard.stat()

    def touch(event: object) -> None:
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns + 1_000_000_000))

    with pytest.raises(SourceError, match="changed while"):
        run(source, tmp_path / "out", on_progress=touch)


# places


def test_target_inside_source(source: Path) -> None:
    with pytest.raises(UsageError, match="inside the source") as caught:
        run(source, source / "out")
    assert caught.value.exit_code == 2 and not (source / "out.partial").exists()


def test_source_inside_target(tmp_path: Path) -> None:
    source = write_moe(tmp_path / "out" / "model", "qwen3_moe")
    with pytest.raises(UsageError):
        run(source, tmp_path / "out")


def test_link_to_the_source_as_target(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(UsageError):
        run(source, tmp_path / "link" / "out")


@pytest.mark.parametrize("kind", ["file", "files", "dangling"])
def test_target_that_is_something_else(source: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "files":
        out.mkdir()
        (out / "thesis.txt").write_text("mine")
    else:
        out.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError) as caught:
        run(source, out)
    assert str(out) in str(caught.value)
    if kind == "files":
        assert (out / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("linked", [False, True])
def test_empty_target_is_fine(source: Path, tmp_path: Path, linked: bool) -> None:
    real = tmp_path / "elsewhere" / "real" if linked else tmp_path / "out"
    real.mkdir(parents=True)
    if linked:
        (tmp_path / "out").symlink_to(real)
    run(source, tmp_path / "out")
    assert verify_artifact(tmp_path / "out", quick=True).ok
    assert sorted(path.name for path in real.parent.iterdir() if path.name.startswith(real.name)) == [real.name]


def test_current_directory_as_target(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rename would leave the shell in a directory that is deleted."""
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    with pytest.raises(UsageError, match="current directory"):
        run(source, Path())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_working_directory_taken(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "notes.txt").write_text("mine")
    with pytest.raises(Exception, match="no unfinished conversion"):
        run(source, tmp_path / "out")
    assert (tmp_path / "out.partial" / "notes.txt").read_text() == "mine"


def test_consume_needs_a_hub(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only downloads"):
        run(source, tmp_path / "out", consume=True)


def test_zero_workers(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="0 workers"):
        run(source, tmp_path / "out", jobs=0)


# disks


def test_not_enough_space_is_known_before_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)

    class Small:
        f_bavail, f_frsize = 10, real.f_frsize

    monkeypatch.setattr(target_module.os, "statvfs", lambda path: Small)
    with pytest.raises(EnvironmentProblem, match=r"needed, .* free") as caught:
        run(source, tmp_path / "out")
    assert caught.value.exit_code == 4
    assert not (tmp_path / "out.partial").exists()  # nothing was done: nothing is left lying about


def test_the_name_of_an_unfinished_conversion(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ends in \.partial"):
        run(source, tmp_path / "out.partial")
    assert list(tmp_path.glob("out*")) == []


@pytest.mark.parametrize("nth", [1, 4, 12])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_disk_fails_under_way(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int, code: int
) -> None:
    real, count = os.pwrite, 0

    def failing(fd: int, data: memoryview, offset: int) -> int:
        nonlocal count
        count += 1
        if count >= nth:
            raise OSError(code, os.strerror(code))
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(shard_module.os, "pwrite", failing)
        with pytest.raises(EnvironmentProblem) as caught:
            run(source, tmp_path / "out")
    assert caught.value.exit_code == 4
    assert ("no space left" in str(caught.value)) == (code != errno.EIO)
    assert "same command again" in str(caught.value)
    run(source, tmp_path / "out")
    run(source, tmp_path / "whole")
    assert core_digests(tmp_path / "out") == core_digests(tmp_path / "whole")


def test_file_size_limit(source: Path, tmp_path: Path) -> None:
    """A real refusal by the kernel: EFBIG through RLIMIT_FSIZE, in a process of its own."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom quantkit.errors import QuantkitError\n"
        "from tests.quantkit.convert.cases import run\n"
        "try: run(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "except QuantkitError as problem: print(problem); sys.exit(problem.exit_code)\n"
    )

    def limit() -> None:
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    done = subprocess.run(
        [sys.executable, "-c", code, source, tmp_path / "out"],
        cwd=ROOT, preexec_fn=limit, capture_output=True, text=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert "no space left" in done.stdout
    run(source, tmp_path / "out")
    assert verify_artifact(tmp_path / "out").ok


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount a file system")
def test_full_tmpfs(source: Path, tmp_path: Path) -> None:
    """A disk that really is full: 1 MiB for an artifact of some 3 MB, with the check before work switched off."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mount is not allowed here")
    try:
        with pytest.raises(EnvironmentProblem, match="not enough disk space"):
            run(source, disk / "out")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("quantkit.convert.run.check_space", lambda *args, **kwargs: None)
            with pytest.raises(EnvironmentProblem, match="no space left"):
                run(source, disk / "out")
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        run(source, disk / "out")
        assert verify_artifact(disk / "out").ok
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_directory(source: Path, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    with pytest.raises(EnvironmentProblem, match="cannot write here"):
        run(source, tmp_path / "closed" / "out")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount a file system")
def test_read_only_file_system(source: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mount is not allowed here")
    try:
        with pytest.raises(EnvironmentProblem, match="cannot write here") as caught:
            run(source, disk / "out")
        assert caught.value.exit_code == 4
    finally:
        subprocess.run(["umount", disk], check=True)
