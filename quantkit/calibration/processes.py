"""One of several processes that torchrun or ``accelerate launch`` started, on torch.distributed.

accelerate's ``PartialState`` sets the group up, always with gloo: what travels (hidden states, outputs of experts,
packed weights) lies in host memory, also when a GPU computes, and gloo notices at once that a process is gone,
where NCCL waits for its watchdog. All of it happens in the main thread, in an order that every process knows.
"""

from __future__ import annotations

import os
import pickle
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from quantkit.errors import EnvironmentProblem, SaidElsewhere, UsageError

from .ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor

JOIN = timedelta(minutes=10)  # between the starts of the processes
STEP = timedelta(minutes=30)  # a process waits for another's batches or expert; gone ones are noticed at once
WORK = timedelta(days=7)  # process 0 works alone (everything that needs no calibration) while the others wait
SAY = timedelta(seconds=20)  # for process 0 to say an error of another one, and for the others to hear of it
_CALIBRATE, _OVER = 1, 0


class Lost(Exception):
    """The connection to another process has ended."""


class Processes(Ranks):
    """One of ``size`` processes; see ``Ranks`` for what the methods do.

    Every method that communicates raises ``Lost`` when a process has ended; ``together`` makes an error of it.
    """

    def __init__(self, rank: int, size: int) -> None:
        """Join the others.

        Raises:
            EnvironmentProblem: they did not come, or accelerate is not installed.
        """
        self.rank, self.size = rank, size
        self._is_over = False
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # stack traces of what is handled here
        try:
            import torch
            import torch.distributed.nn.functional  # imported later it would keep the connections open: see leave
            from accelerate import PartialState
            from torch.distributed.rendezvous import rendezvous
        except ImportError as problem:
            raise EnvironmentProblem(
                f"several processes need {problem.name}", where=f"WORLD_SIZE={size}",
                hint="pip install 'quantkit[calibrate]', or start one process without a launcher",
            ) from problem  # fmt: skip
        threads = torch.get_num_threads()
        try:
            self._store, _, _ = next(iter(rendezvous("env://", rank, size, timeout=JOIN)))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # on numbers of threads, which are set where work is done
                self._state = PartialState(cpu=True, store=self._store, timeout=STEP)
        except (RuntimeError, ValueError) as problem:
            raise EnvironmentProblem(
                f"process {rank} of {size} did not find the others: {str(problem).splitlines()[0]}",
                where=f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}",
                hint="Start all with torchrun or accelerate launch; GLOO_SOCKET_IFNAME chooses the network",
            ) from problem  # fmt: skip
        torch.set_num_threads(threads)

    def everywhere(self, rows: Tensor, owner: int) -> None:
        import torch.distributed as dist

        with _connection():
            dist.broadcast(rows, owner)

    def to_first(self, rows: Tensor, owner: int) -> None:
        self._move(rows, owner, 0)

    def from_first(self, rows: Tensor, owner: int) -> None:
        self._move(rows, 0, owner)

    def share(self, found: Tensor | None, tokens: Tensor, places: Tensor, owner: int, like: Tensor) -> Any:
        mine = (places == self.rank).nonzero().flatten()
        if found is None:
            found = like.new_empty(len(mine), like.shape[1])
            self._move(found, owner, self.rank)
            return tokens[mine], found
        for other in range(self.size):
            self._move(found[places == other], owner, other)
        return tokens[mine], found[mine]

    def _move(self, rows: Tensor, source: int, target: int) -> None:
        import torch.distributed as dist

        if source == target or rows.numel() == 0:
            return
        with _connection():
            if self.rank == source:
                dist.send(rows, target)
            elif self.rank == target:
                dist.recv(rows, source)

    def tell(self, value: Any) -> Any:
        import torch.distributed as dist

        box = [value]
        with _connection():
            dist.broadcast_object_list(box, 0)
        return box[0]

    def deliver(self, value: Any, owner: int) -> Any:
        import torch.distributed as dist

        if owner == 0:
            return value if self.is_first else None
        box = [value]
        with _connection():
            if self.rank == owner:
                dist.send_object_list(box, 0)
            elif self.is_first:
                dist.recv_object_list(box, owner)
        return box[0] if self.is_first else None

    def agree(self, facts: Mapping[str, Any]) -> None:
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        with _connection():
            dist.all_gather_object(found, dict(facts))
        for rank, other in enumerate(found):
            names = [name for name in found[0] if found[0][name] != other.get(name)]
            if names:
                name = names[0]
                raise UsageError(
                    f"processes 0 and {rank} differ in {' and '.join(names)}: "
                    f"{found[0][name]!r} and {other.get(name)!r}",
                    where=f"{self.size} processes", accepted="the same command, files and kind of machine in all",
                )  # fmt: skip

    def call(self) -> None:
        self._signal(_CALIBRATE)

    def called(self) -> bool:
        """May take as long as everything that needs no calibration."""
        import torch
        import torch.distributed as dist

        word = torch.zeros(1, dtype=torch.int64)
        with _connection():
            work: Any = dist.irecv(word, 0)
            work.wait(timeout=WORK)
        self._is_over = int(word) == _OVER
        return not self._is_over

    def finish(self) -> None:
        """Process 0 has finished; the others wait for that."""
        if self.is_first:
            self._signal(_OVER)
        elif not self._is_over and self.called():
            raise RuntimeError("called twice")

    def _signal(self, word: int) -> None:
        import torch
        import torch.distributed as dist

        with _connection():
            for other in range(1, self.size):
                dist.send(torch.tensor([word]), other)

    def failed(self, error: BaseException | None, *, is_told: bool) -> BaseException:
        """What this process raises: the run's error, or ``SaidElsewhere`` if another process raises that.

        The first error counts; ``together.py`` says how it becomes everybody's.

        Args:
            error: of this process's own work; None when it stops because of another's end.
            is_told: its launcher told it to end.
        """
        first, lost = self._first_error(error, _gone(self.size, is_told))
        self.leave()
        try:
            if self.is_first:
                return self._say(first, self.size - 1 - lost)
            return self._hear(first)
        except RuntimeError:  # the store, which process 0 may keep, has ended with it
            return first

    def _say(self, first: BaseException, listeners: int) -> BaseException:
        """Process 0 says it, unless another had no more patience, and stays until the others have heard so.

        One that computes for longer than ``SAY``, or was killed when another one was, is not waited for; it may
        then say for itself that process 0 has gone.
        """
        if self._store.add("sayers", 1) > 1:
            return SaidElsewhere(first)
        self._store.set("said", "yes")
        end = time.monotonic() + SAY.total_seconds()
        while self._store.add("heard", 0) < listeners and time.monotonic() < end:
            time.sleep(0.02)
        return first

    def _hear(self, first: BaseException) -> BaseException:
        """Another process leaves it to process 0, or after ``SAY`` to whoever is first."""
        try:
            self._store.wait(["said"], SAY)
            is_said = True
        except RuntimeError:
            is_said = self._store.add("sayers", 1) > 1
        self._store.add("heard", 1)
        return SaidElsewhere(first) if is_said else first

    def _first_error(self, own: BaseException | None, gone: BaseException) -> tuple[BaseException, int]:
        """The error that was posted first (this process's if none was), and how many ended without posting one."""
        mine = f"{0 if own else 1}{_packed(own or gone)}"
        try:
            text = self._store.compare_set("error", "", mine).decode()
        except RuntimeError:
            return own or gone, 1
        lost = int(text[0])
        return (own or gone, lost) if text == mine else (_unpacked(text[1:]), lost)

    def leave(self) -> None:
        """Close the connections, so that the others notice; they stay open while anything refers to the group.

        torch.distributed.nn does if it is imported (by transformers) when there is a group: as a default argument.
        """
        with suppress(RuntimeError, ValueError, AssertionError):  # closed already, or it failed: over anyway
            self._state.destroy_process_group()


@contextmanager
def _connection() -> Iterator[None]:
    try:
        yield
    except RuntimeError as problem:
        raise Lost(str(problem)) from problem


def _gone(size: int, is_told: bool) -> EnvironmentProblem:
    return EnvironmentProblem(
        "the launcher ended the run" if is_told else "another process of the run ended", where=f"{size} processes",
        hint="Run the same command again, with any number of processes: it resumes",
    )  # fmt: skip


def _packed(error: BaseException) -> str:
    trace = "".join(traceback.format_exception(error))
    try:
        data = pickle.dumps((error, trace))
        pickle.loads(data)
    except Exception:  # an error whose parts can't travel
        data = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return data.hex()


def _unpacked(text: str) -> BaseException:
    error: BaseException
    error, trace = pickle.loads(bytes.fromhex(text))
    error.add_note(f"in another process:\n{trace}")
    return error
