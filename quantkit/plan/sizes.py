"""Exact bytes of the source and of both views: of tensor data, and of files with their headers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..models.role import Role
from .fate import Fate, Shard


@dataclass(frozen=True, slots=True)
class ViewSize:
    """One set of weight files.

    Attributes:
        tensor_bytes: bytes of tensor data.
        file_bytes: bytes of the weight files, headers included (config, tokenizer and index not).
        num_files, num_tensors: counts.
        by_role: role -> dtype -> bytes of tensor data; dtypes in safetensors' spelling.
    """

    tensor_bytes: int
    file_bytes: int
    num_files: int
    num_tensors: int
    by_role: Mapping[Role, Mapping[str, int]]

    @property
    def by_dtype(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for dtypes in self.by_role.values():
            total.update(dtypes)
        return dict(total)

    def role_bytes(self, role: Role) -> int:
        return sum(self.by_role.get(role, {}).values())

    def to_json(self) -> dict[str, object]:
        return {
            "tensor_bytes": self.tensor_bytes,
            "file_bytes": self.file_bytes,
            "files": self.num_files,
            "tensors": self.num_tensors,
            "by_role": {role.value: dict(sorted(d.items())) for role, d in sorted(self.by_role.items())},
        }


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the source and of the two views that come of it."""

    source: ViewSize
    decode: ViewSize
    prefill: ViewSize

    def to_json(self) -> dict[str, object]:
        return {
            "source": self.source.to_json(),
            "decode": self.decode.to_json(),
            "prefill": self.prefill.to_json(),
        }


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """Free space that a conversion needs, in bytes.

    Attributes:
        decode: weight files of the decode view (0 when the publisher's files are that view).
        prefill: weight files of a derived prefill view (0 when the publisher's files are that view).
        publisher: weight files of the source, which one view holds; needed only where they are copied and not
            linked or referenced.
        other: tokenizer, configuration, index and records, estimated from above.
    """

    decode: int
    prefill: int
    publisher: int
    other: int

    def total(self, *, copies_source: bool) -> int:
        return self.decode + self.prefill + self.other + (self.publisher if copies_source else 0)


def measure_source(tensors: Iterable[tuple[Role, str, int]], file_bytes: int, num_files: int) -> ViewSize:
    """Sizes of files as they are, from (role, dtype, bytes) of every tensor."""
    by_role: dict[Role, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    count = total = 0
    for role, dtype, nbytes in tensors:
        by_role[role][dtype] += nbytes
        count, total = count + 1, total + nbytes
    return ViewSize(total, file_bytes, num_files, count, {role: dict(d) for role, d in by_role.items()})


def measure_shards(shards: Iterable[Shard], fates: Mapping[str, Fate]) -> ViewSize:
    """Sizes of files to be written."""
    by_role: dict[Role, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    files = tensors = tensor_bytes = file_bytes = 0
    for shard in shards:
        files, file_bytes = files + 1, file_bytes + shard.file_nbytes
        for job in shard.jobs:
            dtypes = by_role[fates[job.sources[0]].role]
            for output in job.outputs:
                dtypes[output.dtype] += output.nbytes
                tensors, tensor_bytes = tensors + 1, tensor_bytes + output.nbytes
    return ViewSize(tensor_bytes, file_bytes, files, tensors, {role: dict(d) for role, d in by_role.items()})
