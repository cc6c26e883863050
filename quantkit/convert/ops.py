"""Runs one job: reads source tensors in runs of rows, converts, writes output tensors in order.

Memory is one tile at a time, whatever the size of the tensor. A tile is a whole number of block rows, and every
result is a function of its rows alone, so that the tile size (and thereby ``--max-memory``) never shows in the
bytes. Numerics are those of ``quantkit_kernels``; nothing is computed here but the error figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..artifact.canonical import round_figure
from ..artifact.dequantize import RowReader, nan_code_error, row_nbytes, row_tiles
from ..artifact.shard import ShardWriter, TensorSink
from ..checkpoint.tensor import Storage, StoredWeight, TensorInfo
from ..errors import SourceError
from ..plan.fate import Job, Op
from ..scheme import FP8_BLOCK

if TYPE_CHECKING:
    from quantkit_kernels import Int4Weight

    from ..checkpoint import Checkpoint

OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class JobResult:
    """sha256 of every output of a job, its relative error where something was rounded, how it was calibrated.

    ``method`` is the one that made it where that is not the job's (a retry under the quality budget).
    """

    outputs: dict[str, str]
    relative_error: float | None = None
    calibration: dict[str, Any] | None = None
    method: str | None = None

    def to_line(self) -> list[Any]:
        """For the journal; ``JobResult(*line)`` takes it back."""
        line = [self.outputs, self.relative_error, self.calibration, self.method]
        while line[-1] is None and len(line) > 2:
            line.pop()
        return line


@dataclass(frozen=True, slots=True)
class JobContext:
    """What jobs need besides themselves.

    Attributes:
        by_tensor: name of a weight's first tensor -> the weight.
        tile_bytes: upper bound of source bytes per tile (at least one row of blocks is read).
        on_bytes: told the bytes of source consumed; may raise to stop.
    """

    checkpoint: Checkpoint
    by_tensor: Mapping[str, StoredWeight]
    tile_bytes: int
    on_bytes: OnBytes


def run_job(job: Job, context: JobContext, writer: ShardWriter) -> JobResult:
    """Execute one job.

    Raises:
        SourceError: NaN codes or scales that are no positive numbers in the source.
        EnvironmentProblem: the disk refuses.
    """
    sinks = {output.name: writer.sink(output.name) for output in job.outputs}
    error = _OPERATIONS[job.op](job, context, sinks)
    return JobResult({name: sink.digest() for name, sink in sinks.items()}, error)


def known_outputs(jobs: Iterable[Job], by_tensor: Mapping[str, StoredWeight]) -> dict[str, bytes]:
    """Name and bytes of the outputs that follow from shapes alone."""
    return {
        output.name: _shape_bytes(by_tensor[job.sources[0]])
        for job in jobs
        for output in job.outputs
        if job.op is Op.TO_INT4 and output.name.endswith(".weight_shape")
    }


def _copy(job: Job, context: JobContext, sinks: Mapping[str, TensorSink]) -> None:
    info = context.checkpoint.tensors[job.sources[0]]
    (sink,) = sinks.values()
    buffer = memoryview(bytearray(min(context.tile_bytes, info.nbytes)))
    position = 0
    while position < info.nbytes:
        piece = buffer[: min(len(buffer), info.nbytes - position)]
        context.checkpoint.read_into(info, position, piece)
        if info.dtype == "F8_E4M3":
            _refuse_nan_codes(info, position, piece)
        sink.write(piece)
        position += len(piece)
        context.on_bytes(len(piece))


def _refuse_nan_codes(info: TensorInfo, position: int, piece: memoryview) -> None:
    """A trained weight holds no NaN; what is passed through is looked at like what is converted."""
    import numpy as np

    is_nan = (np.frombuffer(piece, np.uint8) & 0x7F) == 0x7F
    if is_nan.any():
        row, column = divmod(position + int(is_nan.argmax()), info.shape[-1] if info.shape else 1)
        raise nan_code_error(info, row, column)


def _to_int4(job: Job, context: JobContext, sinks: Mapping[str, TensorSink]) -> float:

    reader = _reader(job, context)
    packed, scale, shape = (_by_suffix(sinks, s) for s in ("weight_packed", "weight_scale", "weight_shape"))
    assert job.group_size is not None and job.method is not None  # planning fills both for TO_INT4
    figure = _ErrorFigure()
    for start, stop in _tiles(reader.weight, context):
        with reader.bad_numbers():
            result = quantize_rows(reader, start, stop, job.group_size, job.method)
        packed.write(_bytes(result.packed))
        scale.write(_bytes(result.scale))
        figure.add(result.error, result.energy)
        context.on_bytes((stop - start) * row_nbytes(reader.weight))
    shape.write(_shape_bytes(reader.weight))
    return figure.relative(reader.weight.weight)


def write_int4(
    job: Job, weight: StoredWeight, result: Int4Weight, writer: ShardWriter, calibration: dict[str, Any]
) -> JobResult:
    """Write what calibration made of a whole weight; the counterpart of ``run_job`` for calibrated methods."""

    sinks = {output.name: writer.sink(output.name) for output in job.outputs}
    _by_suffix(sinks, "weight_packed").write(_bytes(result.packed))
    _by_suffix(sinks, "weight_scale").write(_bytes(result.scale))
    _by_suffix(sinks, "weight_shape").write(_shape_bytes(weight))
    digests = {name: sink.digest() for name, sink in sinks.items()}
    return JobResult(digests, relative_error(weight, result), calibration)


def relative_error(weight: StoredWeight, result: Int4Weight) -> float:
    """The error of a whole weight as it is recorded.

    Raises:
        SourceError: the squares are beyond float32.
    """
    figure = _ErrorFigure()
    figure.add(result.error, result.energy)
    return figure.relative(weight.weight)


def quantize_rows(reader: RowReader, start: int, stop: int, group_size: int, method: str) -> Int4Weight:
    """Rows of a weight by a method without calibration."""
    import quantkit_kernels as kernels

    if reader.weight.storage in (Storage.PLAIN, Storage.INT4_GROUP):
        numbers = _plain_or_float32(reader, start, stop)
        return kernels.float_to_int4(numbers, group_size, method, row_offset=start)
    assert reader.scales is not None  # our invariant: only PLAIN has none
    codes = reader.codes(start, stop)
    return kernels.fp8_to_int4(codes, reader.scales, reader.weight.block, group_size, method, row_offset=start)


def _to_fp8(job: Job, context: JobContext, sinks: Mapping[str, TensorSink]) -> float:
    import numpy as np

    import quantkit_kernels as kernels

    reader = _reader(job, context)
    codes_sink, scale_sink = _by_suffix(sinks, "weight"), _by_suffix(sinks, "weight_scale_inv", "weight_scale")
    figure = _ErrorFigure()
    # Five float32 copies of the tile live at once: cut it so that they stay small next to what others need.
    tile_bytes = context.tile_bytes // (8 if reader.weight.storage is Storage.INT4_GROUP else 2)
    for start, stop in row_tiles(reader.weight.shape[0], row_nbytes(reader.weight), FP8_BLOCK[0], tile_bytes):
        weight = reader.float32(start, stop)
        with reader.bad_numbers():
            codes, scales = kernels.float_to_fp8(weight, FP8_BLOCK, row_offset=start)
        codes_sink.write(_bytes(codes))
        scale_sink.write(_bytes(scales))
        back = kernels.fp8_to_float32(codes, scales, FP8_BLOCK)
        with np.errstate(over="ignore"):  # relative() refuses it
            figure.add(np.square(back - weight), np.square(weight))
        context.on_bytes((stop - start) * row_nbytes(reader.weight))
    return figure.relative(reader.weight.weight)


def _to_bf16(job: Job, context: JobContext, sinks: Mapping[str, TensorSink]) -> None:
    import quantkit_kernels as kernels

    reader = _reader(job, context)
    (sink,) = sinks.values()
    for start, stop in _tiles(reader.weight, context):
        codes, storage = reader.codes(start, stop), reader.weight.storage
        if storage is Storage.INT4_GROUP:
            bits = kernels.int4_to_bf16(
                codes, reader.scale_rows(start, stop), reader.weight.shape[1], group_size=reader.weight.block[1]
            )
        elif storage is Storage.PLAIN:
            bits = kernels.float32_to_bf16(reader.float32(start, stop))
        else:
            assert reader.scales is not None  # our invariant: only PLAIN has none
            with reader.bad_numbers():
                bits = kernels.fp8_to_bf16(codes, reader.scales, reader.weight.block, row_offset=start)
        sink.write(_bytes(bits))
        context.on_bytes((stop - start) * row_nbytes(reader.weight))


_OPERATIONS: dict[Op, Callable[[Job, JobContext, Mapping[str, TensorSink]], float | None]] = {
    Op.COPY: _copy, Op.TO_INT4: _to_int4, Op.TO_FP8: _to_fp8, Op.TO_BF16: _to_bf16,
}  # fmt: skip


class _ErrorFigure:
    """Relative error of a weight, summed so that the cut into tiles does not show.

    Sums run along each row in float64 first; the rows are added up at the end in one go.
    """

    def __init__(self) -> None:
        self._error: list[Any] = []
        self._energy: list[Any] = []

    def add(self, error: Any, energy: Any) -> None:
        import numpy as np

        self._error.append(error.sum(axis=1, dtype=np.float64))
        self._energy.append(energy.sum(axis=1, dtype=np.float64))

    def relative(self, info: TensorInfo) -> float:
        """Of the weight ``info``.

        Raises:
            SourceError: the squares are beyond float32; no trained weight is.
        """
        import numpy as np

        error = float(np.concatenate(self._error).sum()) if self._error else 0.0
        energy = float(np.concatenate(self._energy).sum()) if self._energy else 0.0
        if not np.isfinite(error) or not np.isfinite(energy):
            raise SourceError(
                "numbers so large that their squares overflow float32", where=info.place,
                accepted="weights below 1e18", hint="The source is damaged: download it again.",
            )  # fmt: skip
        return round_figure((error / energy) ** 0.5) if energy > 0 else 0.0


def _reader(job: Job, context: JobContext) -> RowReader:
    return RowReader(context.checkpoint, context.by_tensor[job.sources[0]])


def _plain_or_float32(reader: RowReader, start: int, stop: int) -> Any:
    """Rows of a weight that is not FP8, as the kernels take them: BF16 bits, float16 or float32."""
    return reader.codes(start, stop) if reader.weight.storage is Storage.PLAIN else reader.float32(start, stop)


def _tiles(weight: StoredWeight, context: JobContext) -> Iterator[tuple[int, int]]:
    """Runs of rows; blocks of the source may be cut, since the kernels take a row offset."""
    return row_tiles(weight.shape[0], row_nbytes(weight), 1, context.tile_bytes)


def _by_suffix(sinks: Mapping[str, TensorSink], *suffixes: str) -> TensorSink:
    for name, sink in sinks.items():
        if name.rpartition(".")[2] in suffixes:
            return sink
    raise RuntimeError(f"no output called {' or '.join(suffixes)} among {', '.join(sinks)}")


def _shape_bytes(weight: StoredWeight) -> bytes:
    return b"".join(size.to_bytes(8, "little") for size in weight.shape)


def _bytes(array: Any) -> memoryview:
    import numpy as np

    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
