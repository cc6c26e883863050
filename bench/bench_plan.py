"""Figure 1: `quantkit plan` of header-only copies with the published shapes: exact bytes, time and memory.

    python bench/bench_plan.py [--json FILE] [--work DIR]

For GLM-5.2-FP8, DeepSeek-V3.2 and Kimi-K2-Instruct the planned source bytes must equal the published count, and
the INT4 sizes at group size 32, 64 and 128 (MTP experts kept FP8) those of the published size table. Time and
peak memory (PSS over the process tree) are those of the whole command, start-up and the JSON document with a
line for every tensor included.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from make_headers import load_table, write_sparse
from measure import Measured, Row, run_measured, write_rows

MODELS = ("glm-5.2-fp8", "deepseek-v3.2", "kimi-k2-instruct-fp8")
# 5.0 GiB shards give GLM-5.2 its published 141 files; the split changes no figure but the number of files.
SHARD_BYTES = 5 * 2**30
MAX_WALL_S, MAX_PSS_MIB = 15, 600


def plan(source: Path, group_size: int) -> tuple[Measured, dict[str, object]]:
    """One `quantkit plan --json`, measured, and its document."""
    command = [sys.executable, "-m", "quantkit", "plan", str(source), "--w4", "--json"]
    run = run_measured([*command, "--group-size", str(group_size)])
    if run.returncode:
        raise SystemExit(f"quantkit plan failed with {run.returncode}:\n{run.stderr}")
    return run, json.loads(run.stdout)


def model_rows(model: str, work: Path) -> list[Row]:
    sizes = load_table(model)["sizes"]
    source = work / model
    _, tensors, shards = write_sparse(model, source, SHARD_BYTES)
    rows = [Row(f"{model}: tensors in {shards} shards", tensors, "tensors")]
    for group_size in (32, 64, 128):
        run, document = plan(source, group_size)
        output = document["output"]
        if group_size == 32:
            seen, want = output["prefill"]["tensor_bytes"], sizes["total_tensor_bytes_computed"]
            rows.append(Row(f"{model}: FP8 tensor bytes", seen, "B", "published", want, "equal", seen == want))
            rows.append(
                Row(
                    f"{model}: plan, wall",
                    run.wall_s,
                    "s",
                    target=f"< {MAX_WALL_S}",
                    holds=run.wall_s < MAX_WALL_S,
                )
            )
            mib = run.peak_pss_bytes / 2**20
            rows.append(
                Row(f"{model}: plan, peak PSS", mib, "MiB", target=f"< {MAX_PSS_MIB}", holds=mib < MAX_PSS_MIB)
            )
            bound = document["decode_reads"]["speedup_bound"]
            rows.append(Row(f"{model}: decode speed-up bound, g32", bound, "x"))
        table = sizes["int4_sizes_bytes_scales_bf16"][f"g{group_size}"]
        # The table counts packed weights and scales; the format adds weight_shape, two int64 for each INT4 module.
        shape_bytes = 16 * sum(1 for row in document["fate_rows"] if is_packed(row))
        seen, want = output["decode"]["tensor_bytes"] - shape_bytes, table["main_layers_only_int4_mtp_as_stored"]
        rows.append(
            Row(
                f"{model}: INT4 g{group_size} bytes without weight_shape",
                seen,
                "B",
                "published",
                want,
                "equal",
                seen == want,
            )
        )
    return rows


def is_packed(fate_row: list[object]) -> bool:
    """A fate row of a weight (not of its scale) that becomes INT4."""
    name, decode = str(fate_row[0]), fate_row[5]
    return decode == "quantize" and name.endswith(".weight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--work", type=Path, help="directory for the sparse copies (a few hundred MiB)")
    a = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=a.work) as work:
        for model in MODELS:
            rows += model_rows(model, Path(work))
    write_rows(rows, a.json)


if __name__ == "__main__":
    main()
