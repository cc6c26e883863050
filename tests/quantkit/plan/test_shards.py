"""Files of a view: names, order, split, alignment, exact sizes; the header against the safetensors library."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.dtypes import BITS
from quantkit.plan.fate import Job, Op, Shard
from quantkit.plan.shards import natural_key, pack
from quantkit.safetensors_header import file_order, render_header
from quantkit.scheme import OutputTensor


def job(name: str, nbytes: int) -> Job:
    return Job(Op.COPY, (name,), (OutputTensor(name, "U8", (nbytes,)),))


def test_files_by_layer_and_part() -> None:
    jobs = [
        (None, job("lm_head", 3)),
        (10, job("l.10.b", 4)),
        (2, job("l.2.10", 4)),
        (2, job("l.2.9", 4)),
        (2, job("l.2.8", 4)),
    ]
    shards = pack("decode", jobs, 8)
    assert [(s.file, s.layer, [j.sources[0] for j in s.jobs]) for s in shards] == [
        ("model-layer-00002.safetensors", 2, ["l.2.8", "l.2.9"]),
        ("model-layer-00002-part-2.safetensors", 2, ["l.2.10"]),
        ("model-layer-00010.safetensors", 10, ["l.10.b"]),
        ("model-other.safetensors", None, ["lm_head"]),
    ]


def test_a_tensor_over_the_limit_has_a_file_of_its_own() -> None:
    shards = pack("decode", [(None, job(n, size)) for n, size in (("a", 2), ("b", 100), ("c", 2))], 10)
    assert [[j.sources[0] for j in s.jobs] for s in shards] == [["a"], ["b"], ["c"]]


@given(st.lists(st.tuples(st.sampled_from([None, 0, 1, 20]), st.integers(1, 30)), min_size=1), st.integers(1, 60))
def test_split_keeps_every_job_and_the_limit(sizes: list[tuple[int | None, int]], limit: int) -> None:
    jobs = [(layer, job(f"t.{i}", size)) for i, (layer, size) in enumerate(sizes)]
    shards = pack("decode", jobs, limit)
    assert sorted(j.sources for s in shards for j in s.jobs) == sorted(j.sources for _, j in jobs)
    assert all(s.nbytes <= limit or len(s.jobs) == 1 for s in shards)
    assert pack("decode", reversed(jobs), limit) == shards


def test_natural_order() -> None:
    names = ["a.10", "a.9", "b", "10", "a", "a.9.x", ""]
    assert sorted(names, key=natural_key) == ["", "10", "a", "a.9", "a.9.x", "a.10", "b"]


dtypes = st.sampled_from(["I64", "F32", "I32", "BF16", "F8_E4M3", "U8"])


@given(st.lists(st.tuples(dtypes, st.lists(st.integers(0, 5), max_size=3)), max_size=12))
def test_header_is_what_safetensors_reads_and_every_tensor_is_aligned(kinds: list[tuple[str, list[int]]]) -> None:
    from safetensors import deserialize

    tensors = file_order(OutputTensor(f'x.{i} "é', dtype, tuple(shape)) for i, (dtype, shape) in enumerate(kinds))
    header = render_header(tensors)
    assert len(header) % 8 == 0
    data = b"\1" * sum(t.nbytes for t in tensors)
    read = {name: (info["dtype"], tuple(info["shape"])) for name, info in deserialize(header + data)}
    assert read == {t.name: (t.dtype, t.shape) for t in tensors}
    parsed = json.loads(header[8:])
    assert parsed.pop("__metadata__") == {"format": "pt"}
    for t in tensors:
        assert parsed[t.name]["data_offsets"][0] % (BITS[t.dtype] // 8) == 0
    assert Shard("decode", "f", None, (Job(Op.COPY, ("a",), tensors),)).file_nbytes == len(header) + len(data)


@pytest.mark.parametrize("scale_rows", [1, 3])
def test_int4_after_an_odd_scale_stays_aligned(scale_rows: int) -> None:
    """A [1, 1] F32 scale before an int64 shape would put it on an offset that torch can't view."""
    odd = Job(Op.COPY, ("s",), (OutputTensor("s", "F32", (scale_rows, 1)),))
    int4 = Job(Op.TO_INT4, ("w",), (OutputTensor("w.weight_shape", "I64", (2,)),), "rtn", 32)
    assert [t.name for t in Shard("decode", "f", 0, (odd, int4)).tensors] == ["w.weight_shape", "s"]
