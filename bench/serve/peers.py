"""Figure 4: against transformers' generate and vLLM's CPU build, one request and sixteen, the same load.

    python bench/serve/peers.py [--size mid|small] [--models DIR] [--json FILE.json] [PART ...]

``transformers`` runs the BF16 weights of tiny-glm and of ``glm``; ``vllm`` those of ``qwen``, if
QUANTKIT_VLLM_PYTHON names a Python that has vLLM's CPU build; ``vllm-int4`` the same weights with INT4 experts,
group size 32, and a BF16 rest, if QUANTKIT_VLLM_INT4_PYTHON names one that has zentorch, too. Peers are
processes that take turns with our engine; a figure is the best of some rounds, output tokens over the time of
the whole load. ``http`` puts the same load on `quantkit serve`, and on vLLM's server if there is one, with the
generator of `quantkit bench serve`. All have the same number of threads (OMP_NUM_THREADS, else all cores).
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import model
from harness import in_turns, open_engine, run, same_load
from http_servers import quantkit_server, sweep, vllm_server
from options import Options, script
from peer_process import Peer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measure import Row
from quantkit_serve.engine.engine import Engine

HERE = Path(__file__).resolve().parent
PARTS = ("transformers", "vllm", "vllm-int4", "http")
PYTHONS = {"vllm": "QUANTKIT_VLLM_PYTHON", "vllm-int4": "QUANTKIT_VLLM_INT4_PYTHON"}  # environment variables
MODELS = {"transformers": ("tiny-glm", "glm"), "vllm": ("qwen",), "vllm-int4": ("qwen",)}
AT_ONCE = (1, 16)
INPUT_LEN, OUTPUT_LEN = 64, 64
TARGETS = {("transformers", 1): 3.0, ("transformers", 16): 4.0}  # vllm: at least equal


def peer_of(kind: str, name: str, options: Options) -> Peer:
    if kind == "transformers":
        return Peer([sys.executable, str(HERE / "peer_transformers.py"), str(model.bf16(name, options))], {})
    is_int4 = kind == "vllm-int4"
    directory = model.decode_view(model.INT4_FOR_PEERS, options) if is_int4 else model.bf16(name, options)
    eager = ["--eager"] if options.is_small else []
    command = [os.environ[PYTHONS[kind]], str(HERE / "peer_vllm.py"), str(directory), *eager]
    return Peer(command, vllm_environment())


def vllm_environment() -> dict[str, str]:
    """A KV cache of 1 GiB and every core; quantkit's modules are not for another Python."""
    return {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "PYTHONPATH": str(HERE)}


def our_rate(engine: Engine, count: int, output_len: int, seed: int) -> float:
    return run(engine, same_load(count, INPUT_LEN, output_len, seed=seed)).output_throughput


def against(kind: str, name: str, options: Options) -> list[Row]:
    """Our engine and one peer in turns."""
    engine = open_engine(model.artifact(name, options))
    rounds, output_len = (1, 8) if options.is_small else (3, OUTPUT_LEN)
    rows, label = [], kind if kind == "vllm-int4" else f"{kind}, BF16"
    with peer_of(kind, name, options) as peer:
        for count in AT_ONCE:
            best = {"quantkit": 0.0, kind: 0.0}
            for number, who in in_turns(list(best), 1 + rounds):  # the first of each warms up
                if who == kind:
                    rate = peer.rate(count, INPUT_LEN, output_len, number)
                else:
                    rate = our_rate(engine, count, output_len, number)
                best[who] = max(best[who], rate if number else 0.0)
            title, target = f"{name}: {count} at once, dual", TARGETS.get((kind, count), 1.0)
            ratio = best["quantkit"] / best[kind]
            rows.append(Row(title, best["quantkit"], "tok/s", label, best[kind]))
            rows.append(Row(f"  over {kind}", ratio, "x", None, None, f">= {target:g}", ratio >= target))
    return rows


def over_http(options: Options) -> list[Row]:
    """The same load through both servers; they run at the same time and answer in turns."""
    name, python = "qwen", os.environ.get(PYTHONS["vllm"])
    rounds, per_level = (1, 1) if options.is_small else (2, 4)
    output_len = 8 if options.is_small else OUTPUT_LEN
    with ExitStack() as stack:
        server = quantkit_server(model.artifact(name, options))
        servers = {"quantkit": stack.enter_context(server)}
        if python is not None:
            directory = model.bf16(name, options)
            server = vllm_server(python, directory, vllm_environment(), is_eager=options.is_small)
            servers["vllm"] = stack.enter_context(server)
        best: dict[tuple[str, int], float] = {}
        for number, who in in_turns(list(servers), rounds):
            for count in AT_ONCE:
                level = sweep(servers[who], count, per_level * count, INPUT_LEN, output_len, seed=number)
                if level.failed:
                    raise RuntimeError(f"{who}: {level.failures}")
                best[who, count] = max(best.get((who, count), 0.0), level.output_throughput)
    rows = []
    for count in AT_ONCE:
        ours, theirs = best["quantkit", count], best.get(("vllm", count))
        peer = None if theirs is None else "vllm, BF16"
        rows.append(Row(f"{name}: {count} at once over HTTP, dual", ours, "tok/s", peer, theirs))
        if theirs is not None:
            rows.append(Row("  over vllm", ours / theirs, "x", None, None, ">= 1", ours >= theirs))
    return rows


def rows(options: Options) -> list[Row]:
    found = []
    for part in options.names or PARTS:
        variable = PYTHONS.get(part)
        if variable is not None and not os.environ.get(variable):
            print(f"{part}: left out, {variable} names no Python", file=sys.stderr)
        elif part == "http":
            found += over_http(options)
        else:
            found += [row for name in MODELS[part] for row in against(part, name, options)]
    return found


if __name__ == "__main__":
    script(rows, __doc__, names=PARTS)
