"""The last stage: what is written once every tensor is there. Cheap, and done anew on every resume.

Order: side files and configurations, the index, the marks, ``tensors.jsonl``, then the manifest, which lists them
all with their digests. Configurations come last among a view's files because an amendment of the plan may change
them.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from ..artifact.amendment import Amendment
from ..artifact.canonical import readable_json, sha256_hex, tensor_root
from ..artifact.durable import disk_errors, fsync_dir, write_file
from ..artifact.layout import (
    CONFIG,
    DECODE,
    FOLDS,
    INDEX,
    MANIFEST,
    NUMERICS_VERSION,
    TENSORS,
    VIEW_FILE,
    format_version,
    view_path,
)
from ..artifact.manifest import FileEntry, Manifest, Source, ViewEntry, pair_id
from ..artifact.place import Way, place_file
from ..artifact.records import FoldRecord, Outcome, TensorRecord
from ..artifact.view import ViewMark
from ..checkpoint.tensor import Storage
from ..errors import SourceError
from ..plan.fate import Action, Job, Op
from .executor import Executor
from .ops import JobResult
from .target import tool_version

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..plan.fate import Fate

_SMALL_FILE = 64 << 20
ViewName = Literal["prefill", "decode"]
Tensor = tuple[str, str, tuple[int, ...], str]  # name, dtype, shape, sha256


class Finisher:
    """Writes everything but the weights.

    Args:
        executor: all its shards and sources are done.
        engine: what quantized, as the manifest states it.
    """

    def __init__(self, executor: Executor, engine: str) -> None:
        self.plan, self.executor, self.engine = executor.quality.plan, executor, engine
        self.checkpoint: Checkpoint = executor.checkpoint
        self.work = executor.target.work
        self._source_sha = executor.sources.tensor_digests()
        self._files: dict[str, FileEntry] = {}
        self._version = format_version(has_folds=bool(self.plan.folds))
        self._done: dict[str, dict[str, tuple[Job, JobResult]]] = {"prefill": {}, "decode": {}, FOLDS: {}}
        for state in executor.states:
            for index, job in enumerate(state.shard.jobs):
                for source in job.sources:
                    self._done[state.shard.view][source] = job, state.results[index]

    def run(self) -> Manifest:
        """Write the core's remaining files; returns the manifest, which is written last."""
        source_root = tensor_root(self._source_tensors())
        pair = pair_id(
            source_root, self.plan.recipe.content(), self.engine, self._calibration_sha256(),
            format_version=self._version,
        )  # fmt: skip
        views: dict[ViewName, ViewEntry] = {}
        names: tuple[ViewName, ViewName] = ("prefill", "decode")
        for view in names:
            views[view] = self._view(view, pair)
        self._list_shards(FOLDS)
        counts = self._records()
        self._sweep()
        self._sync_dirs()
        manifest = Manifest(
            format_version=self._version, numerics_version=NUMERICS_VERSION,
            tool={"name": "quantkit", "version": tool_version()}, pair_id=pair, source=self._source(source_root),
            recipe=self.plan.recipe.content(), engine=self.engine,
            calibration_sha256=self._calibration_sha256(), views=views, counts=counts,
            files=dict(sorted(self._files.items())), plan_amendments=self._amendments(),
        )  # fmt: skip
        write_file(self.work / MANIFEST, manifest.render())
        return manifest

    def _amendments(self) -> tuple[Amendment, ...]:
        return tuple(found for _, found in sorted(self.executor.quality.amendments.items()))

    def _calibration_sha256(self) -> str | None:
        calibration = self.executor.calibration
        return None if calibration is None else calibration.samples.digest

    # views

    def _is_source(self, view: str) -> bool:
        return self.plan.prefill_is_source if view == "prefill" else self.plan.decode_is_source

    def _view(self, view: ViewName, pair: str) -> ViewEntry:
        is_source = self._is_source(view)
        is_reference = is_source and self.executor.sources.stored == "reference"
        if not is_reference:  # a folder without its weights must not look like a checkpoint
            self._side_files(view)
            self._config(view)
            self._index(view, self._weight_files(view))
        tensors = list(self._source_tensors() if is_source else self._view_tensors(view))
        root = tensor_root(tensors)
        self._write(view_path(view, VIEW_FILE), ViewMark(view, pair, root, self._version).render())
        return ViewEntry(
            origin="publisher" if is_source else "derived",
            stored="reference" if is_reference else "files",
            num_tensors=len(tensors), nbytes=self._view_bytes(view), tensor_root=root,
            transforms=() if is_source else self._transforms(view),
        )  # fmt: skip

    def _view_bytes(self, view: str) -> int:
        if self._is_source(view):
            return sum(info.nbytes for info in self.checkpoint.tensors.values())
        return sum(state.shard.nbytes for state in self.executor.states if state.shard.view == view)

    def _transforms(self, view: str) -> tuple[str, ...]:
        stored = {
            w.weight.name: w.weight.dtype.lower()
            if w.storage is Storage.PLAIN
            else w.storage.value.partition("-")[0]
            for w in self.checkpoint.weights().values()
        }
        found = set()
        for job, _ in self._done[view].values():
            if job.op in (Op.TO_BF16, Op.TO_FP8):
                found.add(f"{stored[job.sources[0]]}-{job.op.value}")
        return tuple(sorted(found))

    def _source_tensors(self) -> Iterator[Tensor]:
        for info in self.checkpoint.tensors.values():
            yield info.name, info.dtype, info.shape, self._source_sha[info.name]

    def _view_tensors(self, view: str) -> Iterator[Tensor]:
        for state in self.executor.states:
            if state.shard.view == view:
                for index, job in enumerate(state.shard.jobs):
                    for output in job.outputs:
                        yield output.name, output.dtype, output.shape, state.results[index].outputs[output.name]

    def _weight_files(self, view: str) -> dict[str, str]:
        """Enters the view's weight files into the list; returns tensor name -> file."""
        if self._is_source(view):
            for file, placed in self.executor.sources.placed.items():
                self._files[view_path(view, file)] = FileEntry(nbytes=placed.nbytes, sha256=placed.sha256)
            return {info.name: info.file for info in self.checkpoint.tensors.values()}
        return self._list_shards(view)

    def _list_shards(self, folder: str) -> dict[str, str]:
        weight_map = {}
        for state in self.executor.states:
            if state.shard.view == folder and state.digest is not None:
                self._files[state.name] = FileEntry(nbytes=state.digest.nbytes, sha256=state.digest.sha256)
                weight_map.update({t.name: state.shard.file for job in state.shard.jobs for t in job.outputs})
        return weight_map

    def _index(self, view: str, weight_map: Mapping[str, str]) -> None:
        """The publisher's own index where it tells the truth about the publisher's files, else ours."""
        if self._is_source(view):
            published = _published_index(self.checkpoint, weight_map)
            if published is not None:
                self._write(view_path(view, INDEX), published)
                return
            if len(self.checkpoint.files) == 1 and "model.safetensors" in self.checkpoint.files:
                return  # the name that loaders find without an index
        content = {"metadata": {"total_size": self._view_bytes(view)}, "weight_map": dict(weight_map)}
        self._write(view_path(view, INDEX), readable_json(content))

    def _config(self, view: str) -> None:
        config = self.plan.prefill_config if view == "prefill" else self.plan.decode_config
        if not self._is_source(view) and config is not None:
            self._write(view_path(view, CONFIG), readable_json(config, constants=True))

    def _side_files(self, view: str) -> None:
        for side in self.checkpoint.side_files:
            regenerated = side.name == CONFIG and not self._is_source(view)
            if regenerated or side.name == VIEW_FILE:  # the mark of another pair must not survive
                continue
            path = view_path(view, side.name)
            if side.nbytes <= _SMALL_FILE:
                self._write(path, self.checkpoint.side_bytes(side.name))
                continue
            source, target = self.checkpoint.fetch(side.name), self.work / path
            target.parent.mkdir(parents=True, exist_ok=True)
            placed = place_file(source, target, Way.COPY, (), lambda count: None)
            self._files[path] = FileEntry(nbytes=placed.nbytes, sha256=placed.sha256)

    def _write(self, path: str, data: bytes) -> None:
        target = self.work / path
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, data, sync_dir=False)
        self._files[path] = FileEntry(nbytes=len(data), sha256=sha256_hex(data))

    # tensors.jsonl

    def _records(self) -> dict[str, dict[str, int]]:
        counts: dict[str, Counter[str]] = {"prefill": Counter(), "decode": Counter()}
        digest, nbytes = hashlib.sha256(), 0
        path = self.work / TENSORS
        with disk_errors(path), open(path, "wb") as handle:
            for name, fate in self.plan.fates.items():
                record = self._record(name, fate)
                counts["prefill"][record.prefill.action] += 1
                counts["decode"][record.decode.action] += 1
                line = record.render()
                digest.update(line)
                nbytes += len(line)
                handle.write(line)
            handle.flush()
            os.fsync(handle.fileno())
        self._files[TENSORS] = FileEntry(nbytes=nbytes, sha256=digest.hexdigest())
        return {
            "source": {"tensors": len(self.plan.fates)},
            **{v: dict(sorted(c.items())) for v, c in counts.items()},
        }

    def _record(self, name: str, fate: Fate) -> TensorRecord:
        info = self.checkpoint.tensors[name]
        return TensorRecord(
            name=name, dtype=info.dtype, shape=info.shape, file=info.file, sha256=self._source_sha[name],
            role=fate.role.value, layer=fate.layer, expert=fate.expert, is_mtp=fate.is_mtp,
            decode=self._outcome("decode", name, fate.decode, fate.decode_names),
            prefill=self._outcome("prefill", name, fate.prefill, fate.prefill_names), reason=fate.reason,
        )  # fmt: skip

    def _outcome(self, view: str, name: str, action: Action, names: Iterable[str]) -> Outcome:
        if action is Action.EXCLUDE or self._is_source(view):
            return Outcome(action.value)
        job, result = self._done[view][name]
        outputs = {output: result.outputs[output] for output in names}
        if action in (Action.KEEP, Action.RENAME):
            self._check_same(name, outputs)
            return Outcome(action.value, {} if action is Action.KEEP else outputs)
        if name != job.sources[0]:
            return Outcome(action.value, outputs)
        return Outcome(
            action.value, outputs, method=result.method or job.method, group_size=job.group_size,
            relative_error=result.relative_error, calibration=result.calibration,
            fold=self._fold(name) if view == DECODE else None,
        )  # fmt: skip

    def _fold(self, name: str) -> FoldRecord | None:
        if name not in self._done[FOLDS]:
            return None
        job, result = self._done[FOLDS][name]
        ((tensor, sha256),) = result.outputs.items()
        return FoldRecord(tensor, sha256, job.sources.index(name))

    def _check_same(self, name: str, outputs: Mapping[str, str]) -> None:
        """The copy was hashed as it was written, the source in another pass: they must agree."""
        if set(outputs.values()) != {self._source_sha[name]}:
            raise SourceError("changed while it was being converted", where=name,
                              hint="Delete the .partial directory and convert again")  # fmt: skip

    # manifest

    def _source(self, root: str) -> Source:
        """Where the tensors came from.

        Kind, label and revision are the only core bytes that tell a Hub repository from a copy of it on the disk:
        everything else, ``pair_id`` included, follows from the tensors, the recipe and the versions.
        """
        checkpoint = self.checkpoint
        named = checkpoint.kind in ("hub", "bundled")
        has_config = any(side.name == CONFIG for side in checkpoint.side_files)
        model_type = checkpoint.config.get("model_type")
        kind: Any = checkpoint.kind
        return Source(
            kind=kind, label=checkpoint.label if named else None, revision=checkpoint.revision,
            family=self.plan.family, model_type=model_type if isinstance(model_type, str) else None,
            config_sha256=sha256_hex(checkpoint.side_bytes(CONFIG)) if has_config else None,
            num_tensors=len(checkpoint.tensors), tensor_root=root,
            files={
                file: FileEntry(nbytes=placed.nbytes, sha256=placed.sha256)
                for file, placed in sorted(self.executor.sources.placed.items())
            },
        )  # fmt: skip

    def _sync_dirs(self) -> None:
        for view in self._done:
            for path in (self.work / view, *(self.work / view).rglob("*")):
                if path.is_dir():
                    fsync_dir(path)

    def _sweep(self) -> None:
        """Remove what an earlier run under other circumstances left: loaders read every weight file they see."""
        for view in self._done:
            for path in sorted((self.work / view).rglob("*"), reverse=True):
                if path.is_dir():
                    if not any(path.iterdir()):
                        path.rmdir()
                elif path.relative_to(self.work).as_posix() not in self._files:
                    path.unlink()
        if not self.plan.folds and (self.work / FOLDS).exists():  # amendments took all
            (self.work / FOLDS).rmdir()


def _published_index(checkpoint: Checkpoint, weight_map: Mapping[str, str]) -> bytes | None:
    """The publisher's index file, when its map is exactly what the headers say and it states total_size."""
    import json

    try:
        data = checkpoint.side_bytes(INDEX)
        content = json.loads(data)
        honest = content["weight_map"] == dict(weight_map) and "total_size" in content["metadata"]
    except (SourceError, ValueError, KeyError, TypeError):
        return None
    return data if honest else None
