"""The header parser against the safetensors library (both directions) and against damage of every kind."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.checkpoint.header import MAX_HEADER_BYTES, FileInfo, read_header
from quantkit.checkpoint.local import LocalStore
from quantkit.checkpoint.tensor import TensorInfo
from quantkit.dtypes import BITS
from quantkit.errors import SourceError
from tests.rawfiles import Raw, f32, file_bytes, header_of, raw_bytes

WHOLE_BYTES = sorted(d for d, bits in BITS.items() if bits % 8 == 0)


class OneFile(LocalStore):
    """A store over bytes in memory: header parsing goes through ``read_at`` only."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.reads: list[tuple[int, int]] = []
        self.label = "memory"

    def names(self) -> dict[str, int]:  # type: ignore[override]
        return {"m.safetensors": len(self.content)}

    def etag(self, name: str) -> str | None:
        return None

    def read_at(self, name: str, offset: int, length: int) -> bytes:
        self.reads.append((offset, length))
        assert offset + length <= len(self.content)
        return self.content[offset : offset + length]


def parse(content: bytes) -> tuple[FileInfo, list[TensorInfo]]:
    return read_header(OneFile(content), "m.safetensors")


names = st.text(min_size=1, max_size=12).filter(lambda s: s != "__metadata__")
tensors = st.tuples(st.sampled_from(WHOLE_BYTES), st.lists(st.integers(0, 3), max_size=3)).map(
    lambda t: Raw(t[0], tuple(t[1]), bytes(BITS[t[0]] // 8 * prod(t[1])))
)
files = st.dictionaries(names, tensors, max_size=6)


def library_reads(content: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    try:
        entries = safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return None
    return {name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for name, entry in entries}


def ours(content: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    _, found = parse(content)
    return {t.name: (t.dtype, t.shape, content[t.offset : t.offset + t.nbytes]) for t in found}


@given(files, st.none() | st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3))
@settings(max_examples=150, deadline=None)
def test_what_we_write_the_library_reads_and_so_do_we(
    content: dict[str, Raw], metadata: dict[str, str] | None
) -> None:
    filled = {n: Raw(t.dtype, t.shape, bytes(i % 251 for i in range(len(t.data)))) for n, t in content.items()}
    written = file_bytes(filled, metadata)
    expected = {n: (t.dtype, t.shape, t.data) for n, t in filled.items()}
    assert library_reads(written) == expected
    assert ours(written) == expected
    info, _ = parse(written)
    assert dict(info.metadata) == (metadata or {})


@given(st.dictionaries(names, st.lists(st.integers(0, 3), max_size=3), max_size=6))
@settings(max_examples=80, deadline=None)
def test_what_the_library_writes_we_read(shapes: dict[str, list[int]]) -> None:
    from safetensors.numpy import save

    arrays = {n: np.arange(prod(s), dtype=np.float32).reshape(s) for n, s in shapes.items()}
    written = save(arrays, metadata={"format": "np"})
    assert ours(written) == {n: ("F32", tuple(a.shape), a.tobytes()) for n, a in arrays.items()}


@given(files.filter(bool), st.data())
@settings(max_examples=300, deadline=None)
def test_what_we_accept_the_library_accepts(content: dict[str, Raw], data: st.DataObject) -> None:
    """Files with one damaged byte or number: either an error of ours, or the library reads the very same."""
    whole = bytearray(file_bytes(content))
    position = data.draw(st.integers(0, len(whole) - 1))
    whole[position] = data.draw(st.sampled_from(b'0123456789[]{}",:-.eEtf \x00\xff'))
    try:
        read = ours(bytes(whole))
    except SourceError:
        return
    assert read == library_reads(bytes(whole))


def test_offsets_are_absolute_and_ordered() -> None:
    header = {
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
    }
    content = raw_bytes(header, bytes(12))
    info, found = parse(content)
    assert [t.name for t in found] == ["a", "b"]
    assert [t.offset for t in found] == [info.data_start, info.data_start + 4]
    assert info.nbytes == len(content) and info.data_start == len(content) - 12


def test_one_read_for_a_usual_shard_and_two_for_a_huge_header() -> None:
    small = OneFile(file_bytes({"a": f32(np.zeros(4))}))
    read_header(small, "m.safetensors")
    assert len(small.reads) == 1
    many = OneFile(file_bytes({f"tensor.{i:06d}": Raw("U8", (1,), b"x") for i in range(5000)}))
    _, found = read_header(many, "m.safetensors")
    assert len(found) == 5000 and len(many.reads) == 2
    info, _ = read_header(many, "m.safetensors")
    assert max(offset + length for offset, length in many.reads) == info.data_start  # no byte of data


GOOD = {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}


def entry(**changes: object) -> dict[str, object]:
    return {"w": {**GOOD["w"], **changes}}


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes are too few"),
    "seven bytes": (b"1234567", "too few"),
    "over the limit": (raw_bytes("{}", length=MAX_HEADER_BYTES + 1) + bytes(99), "over the format's limit"),
    "header cut": (raw_bytes(GOOD, bytes(16))[:30], "truncated"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git lfs pull"),
    "not json": (raw_bytes('{"w": oops}'), "not valid JSON"),
    "no object": (raw_bytes("[1]"), "does not begin with"),
    "leading space": (raw_bytes(" {}"), "does not begin with"),
    "nul padding": (raw_bytes(b"{}\0\0"), "not valid JSON"),
    "not utf-8": (raw_bytes(b'{"\xff": 1}'), "UTF-8"),
    "lone surrogate": (raw_bytes('{"\\ud800": 1}'), "UTF-8"),
    "deep": (raw_bytes("{" + '"a":{' * 200_000), "nested too deeply"),
    "duplicate tensor": (raw_bytes('{"w": {}, "w": {}}'), "'w' twice"),
    "duplicate key inside": (
        raw_bytes('{"w":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        "'dtype' twice",
    ),
    "duplicate metadata": (raw_bytes('{"__metadata__":{"a":"1","a":"2"}}'), "'a' twice"),
    "metadata no strings": (raw_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
    "entry no object": (raw_bytes({"w": 3}), "tensor 'w'"),
    "missing key": (raw_bytes({"w": {"dtype": "F32", "shape": [1]}}, bytes(4)), "dtype, shape and data_offsets"),
    "unknown key": (raw_bytes(entry(scale=2), bytes(16)), "'scale'"),
    "unknown dtype": (raw_bytes(entry(dtype="F5"), bytes(16)), "unknown dtype 'F5'"),
    "dtype no string": (raw_bytes(entry(dtype=["F32"]), bytes(16)), "unknown dtype"),
    "negative shape": (raw_bytes(entry(shape=[-2, -2]), bytes(16)), "[-2, -2]"),
    "float shape": (raw_bytes(entry(shape=[2.0, 2]), bytes(16)), "[2.0, 2]"),
    "bool shape": (raw_bytes(entry(shape=[True, 4]), bytes(16)), "is not a shape"),
    "minus zero": (raw_bytes('{"w":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'), "is not a shape"),
    "string shape": (raw_bytes(entry(shape="22"), bytes(16)), "is not a shape"),
    "huge shape": (raw_bytes(entry(shape=[2**63, 1]), bytes(16)), "is not a shape"),
    "huge product": (raw_bytes(entry(shape=[2**62, 2**62]), bytes(16)), "needs"),
    "huge number": (raw_bytes('{"w":{"dtype":"U8","shape":[' + "9" * 5000 + '],"data_offsets":[0,1]}}'), "JSON"),
    "65 dimensions": (raw_bytes(entry(shape=[1] * 65), bytes(16)), "at most 64"),
    "three offsets": (raw_bytes(entry(data_offsets=[0, 8, 16]), bytes(16)), "no range"),
    "reversed offsets": (raw_bytes(entry(data_offsets=[16, 0]), bytes(16)), "no range"),
    "negative offset": (raw_bytes(entry(data_offsets=[-16, 0]), bytes(16)), "no range"),
    "bytes against shape": (raw_bytes(entry(shape=[2, 3]), bytes(16)), "needs 24 bytes, its offsets hold 16"),
    "half a byte": (raw_bytes({"w": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}}, b"x"), "0.5"),
    "data cut": (raw_bytes(GOOD, bytes(15)), "truncated"),
    "trailing bytes": (raw_bytes(GOOD, bytes(17)), "1 bytes after the last tensor"),
    "data without tensors": (raw_bytes("{}", b"x"), "belong to no tensor"),
    "hole at the start": (raw_bytes(entry(data_offsets=[4, 20]), bytes(20)), "hole of 4 bytes"),
    "overlap": (
        raw_bytes(GOOD | {"v": {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]}}, bytes(16)),
        "overlap",
    ),
    "hole between": (
        raw_bytes(GOOD | {"v": {"dtype": "U8", "shape": [1], "data_offsets": [17, 18]}}, bytes(18)),
        "hole of 1 bytes",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_damage_is_one_clear_error(case: str) -> None:
    content, part = BROKEN[case]
    with pytest.raises(SourceError) as caught:
        parse(content)
    assert caught.value.exit_code == 3
    assert part in str(caught.value)
    assert str(caught.value).startswith("m.safetensors")


def test_beyond_the_library() -> None:
    """What the reference accepts and we refuse; if it becomes as strict, this test says so."""
    for case in ("duplicate tensor inside", "unknown key"):
        content = {
            "duplicate tensor inside": raw_bytes(
                '{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
                b"x",
            ),
            "unknown key": BROKEN["unknown key"][0],
        }[case]
        assert library_reads(content) is not None
        with pytest.raises(SourceError):
            parse(content)


def test_names_are_opaque() -> None:
    odd = ["../x", "/etc/passwd", "", "a\0b", "модель", "C:\\x", "🙂" * 3]
    content = file_bytes({name: Raw("U8", (1,), b"x") for name in odd})
    assert sorted(ours(content)) == sorted(odd)


def test_empty_file_of_no_tensors_and_tensors_of_no_bytes() -> None:
    assert parse(raw_bytes("{}"))[1] == []
    content = file_bytes(
        {"a": Raw("F32", (0, 5), b""), "b": Raw("F32", (2**40, 0), b""), "c": Raw("U8", (1,), b"x")}
    )
    assert [t.nbytes for t in parse(content)[1]] == [0, 0, 1]


def test_digest_is_of_the_header_alone(tmp_path: Path) -> None:
    import hashlib

    header = json.dumps(header_of({"a": Raw("U8", (2,), b"xy")})).encode()
    one, two = (parse(raw_bytes(header, data))[0] for data in (b"xy", b"zz"))
    expected = hashlib.sha256(len(header).to_bytes(8, "little") + header).hexdigest()
    assert one.header_sha256 == two.header_sha256 == expected
