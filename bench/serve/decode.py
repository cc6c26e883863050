"""Figure 1: dual weights against FP8 only and INT4 only: decode of one request, prefill, and three kinds of load.

    python bench/serve/decode.py [--size mid|small] [--models DIR] [--json FILE.json] [NAME ...]

Decode is held against the bound that ``quantkit plan`` computes from the weight bytes that a token reads, and
against the read bandwidth measured in the same run; prefill against torch's BF16 matrix rate. What attention
reads, and that ``kv_b_proj`` is read in BF16, is not in the plan's bytes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

import model
from harness import in_turns, open_engine, run, same_load
from options import Options, script

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
from limits import matrix_rate, read_bandwidth

from measure import Row
from quantkit_serve.engine.engine import Engine

SETS = ("dual", "fp8", "int4")
NAMES = ("glm", "glm-all", "qwen", "tiny-glm")
LOADS = {"prompt-heavy": (1024, 32), "balanced": (256, 256), "output-heavy": (64, 512)}
AT_ONCE = 4
SHARE = 0.90  # of the byte bound


def decode_steps(engines: dict[str, Engine], output_len: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every decode step of each, one request.

    The engines decode the same request in lockstep, one step each in turn, since the bandwidth of a shared machine
    changes within seconds: only neighbouring steps saw the same one. Weights exceed the caches, so an engine
    finds none of its own there, as it wouldn't alone.
    """
    found: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds):
        for engine in engines.values():
            for request in same_load(1, 64, output_len, seed=number):
                engine.add(request)
            engine.step()  # prefill
        names = list(engines)
        for _ in range(output_len - 1):
            names.append(names.pop(0))
            for name in names:
                start = time.perf_counter()
                engines[name].step()
                found[name].append(time.perf_counter() - start)
        if any(engine.has_work for engine in engines.values()):
            raise RuntimeError("an answer is longer than it should be")
    return found


def prefill_rates(engines: dict[str, Engine], input_len: int, rounds: int) -> dict[str, float]:
    """Median prefill tokens per second of each, one request, in turns."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for number, name in in_turns(list(engines), rounds):
        found[name].append(input_len / run(engines[name], same_load(1, input_len, 1, seed=number)).first_token_s)
    return {name: median(rates) for name, rates in found.items()}


def load_rates(engines: dict[str, Engine], load: tuple[int, int], rounds: int) -> dict[str, float]:
    """Best tokens per second, of prompt and answer, of ``AT_ONCE`` requests."""
    best = dict.fromkeys(engines, 0.0)
    for number, name in in_turns(list(engines), rounds):
        found = run(engines[name], same_load(AT_ONCE, *load, seed=number))
        best[name] = max(best[name], AT_ONCE * sum(load) / found.seconds)
    return best


def of_model(name: str, options: Options) -> list[Row]:
    artifact = model.artifact(name, options)
    engines = {weights: open_engine(artifact, weights=weights) for weights in SETS}
    reads, shrink = model.decode_reads(name, options), 16 if options.is_small else 1
    if name == "tiny-glm":
        shrink = max(shrink, 2)  # it was trained for 2,048 positions
    steps = decode_steps(engines, 128 // shrink, 1 if options.is_small else 5)
    decode = {name: 1 / median(seconds) for name, seconds in steps.items()}
    ratio = median(fp8 / dual for fp8, dual in zip(steps["fp8"], steps["dual"], strict=True))
    bound = reads["speedup_bound"]
    rate = decode["dual"] * reads["int4_bytes"]
    rows = [
        Row(f"{name}: decode, one request, dual", decode["dual"], "tok/s", "fp8", decode["fp8"]),
        Row("  int4 alone", decode["int4"], "tok/s"),
        Row("  dual over fp8", ratio, "x", "byte bound", bound, f">= {SHARE:.0%} of it", ratio >= SHARE * bound),
        Row("  weight bytes read, dual", rate / 1e9, "GB/s", "read bandwidth", read_bandwidth() / 1e9),
        Row("  weight bytes read, fp8", decode["fp8"] * reads["fp8_bytes"] / 1e9, "GB/s"),
    ]
    prefill = prefill_rates(engines, 1024 // shrink, 1 if options.is_small else 7)
    ratio = prefill["dual"] / prefill["int4"]
    multiplied = 2 * prefill["dual"] * reads["fp8_bytes"]  # nearly all of a token's weights are a byte each
    rows += [
        Row(f"{name}: prefill, {1024 // shrink} tokens, dual", prefill["dual"], "tok/s", "fp8", prefill["fp8"]),
        Row("  dual over int4", ratio, "x", "int4, tok/s", prefill["int4"], ">= 1", ratio >= 1),
        Row("  products, dual", multiplied / 1e9, "GFLOP/s", "torch BF16", matrix_rate(512, 4096, 4096) / 1e9),
    ]
    for label, (input_len, output_len) in LOADS.items():
        load = (max(input_len // shrink, 8), max(output_len // shrink, 4))
        rates = load_rates(engines, load, 1 if options.is_small else 2)
        title = f"{name}: {label}, {load[0]} in, {load[1]} out, {AT_ONCE} at once"
        rows.append(Row(f"{title}, dual", rates["dual"], "tok/s"))
        rows += [Row(f"  {other}", rates[other], "tok/s") for other in ("fp8", "int4")]
    return rows


def rows(options: Options) -> list[Row]:
    return [row for name in options.names or ("glm", "glm-all") for row in of_model(name, options)]


if __name__ == "__main__":
    script(rows, __doc__, names=NAMES)
