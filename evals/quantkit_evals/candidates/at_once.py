"""Questions to a server from several threads, whose answers come as they are ready.

Not ``concurrent.futures``: its pools wait for all that was handed in, also where nobody listens any more. Here an
end at the listener's side (Ctrl-C, a full disk) ends at once, whatever the server does: threads are daemons that
take no further question.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")


class _Said(NamedTuple, Generic[A]):
    """What a thread has to say: answers of one question, an error, or (without both) that it has ended."""

    answers: tuple[A, ...] = ()
    error: BaseException | None = None
    is_end: bool = False


def at_once(questions: Sequence[Q], answer: Callable[[Q], A], threads: int) -> Iterator[A]:
    """Answers as they come. If one fails, those under way are awaited and given before the error is raised."""
    waiting, lock, stopped = iter(range(len(questions))), threading.Lock(), threading.Event()
    said: SimpleQueue[_Said[A]] = SimpleQueue()

    def work() -> None:
        try:
            while not stopped.is_set():
                with lock:
                    index = next(waiting, None)
                if index is None:
                    break
                said.put(_Said((answer(questions[index]),)))
        except BaseException as error:
            stopped.set()
            said.put(_Said(error=error))
        said.put(_Said(is_end=True))

    running = min(threads, len(questions))
    for _ in range(running):
        threading.Thread(target=work, daemon=True, name="endpoint").start()
    failed: BaseException | None = None
    try:
        while running:
            found = said.get()
            running -= found.is_end
            failed = failed or found.error
            yield from found.answers
    finally:
        stopped.set()
    if failed is not None:
        raise failed
