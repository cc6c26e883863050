"""Answers of one candidate: kept ones, new ones, and stand-ins for what there is no room for.

Questions that are equal are answered once; answers go to the cache as they come, so that what was killed goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from quantkit.errors import ArtifactError, EnvironmentProblem, UsageError

from ..candidates.candidate import Candidate, OnProgress, Progress
from ..candidates.pair import AnswerFailed, NotFinite, PromptRefused
from .cache import ResponseCache, damaged

_TELL_S = 0.25  # between two reports of progress
Place = tuple[str, int]  # task, document
Q = TypeVar("Q")
A = TypeVar("A")


@dataclass(frozen=True)
class Kind(Generic[Q, A]):
    """A kind of request.

    Attributes:
        what: for progress and keys.
        content: what decides the answer, JSON-ready.
        context: tokens that the model reads; tokens: with those of an answer, how much work it is.
        dump, load: an answer as it is kept, JSON-ready.
        stand_in: for an answer that there is none of.
    """

    what: str
    content: Callable[[Q], Any]
    context: Callable[[Q], int]
    tokens: Callable[[Q], int]
    refusal: Callable[[Q], str | None]
    compute: Callable[[Sequence[Q]], Iterator[tuple[int, A]]]
    dump: Callable[[A], Any]
    load: Callable[[Any], A]
    stand_in: A


class Answers:
    """See the module.

    Args:
        cache: folder of kept answers; None keeps none.

    Attributes:
        skipped: reason of each item that has none but stand-in answers.
        context_tokens: of the longest question of each item.
        item_names: how errors name an item.
    """

    def __init__(self, candidate: Candidate, cache: Path | None, on_progress: OnProgress) -> None:
        self.cache = ResponseCache(cache, candidate.identity() | {"state": candidate.state()})
        self.skipped: dict[Place, str] = {}
        self.context_tokens: dict[Place, int] = {}
        self.item_names: Callable[[Place], str] = lambda place: f"task {place[0]}, item {place[1]}"
        self._candidate, self._on_progress = candidate, on_progress

    def to(self, kind: Kind[Q, A], asked: Sequence[tuple[Place, Q]]) -> list[A]:
        """An answer for each, in order: a stand-in, a kept one, or a new one.

        Raises:
            ArtifactError: what the model gives is no number, or kept answers are damaged.
            UsageError: a prompt that the candidate refuses.
            EnvironmentProblem: the candidate or the disk fails; what was answered is kept.
        """
        found: dict[str, A] = {}
        todo: dict[str, tuple[Place, Q]] = {}
        keys: list[str | None] = []
        for place, question in asked:
            self.context_tokens[place] = max(self.context_tokens.get(place, 0), kind.context(question))
            if (why := kind.refusal(question)) is not None:
                self.skipped.setdefault(place, why)
                keys.append(None)
                continue
            key = self.cache.key(kind.what, kind.content(question))
            keys.append(key)
            if key in found or key in todo:
                continue
            if (kept := self.cache.get(key)) is None:
                todo[key] = place, question
            else:
                try:
                    found[key] = kind.load(kept)
                except (TypeError, ValueError) as error:
                    raise damaged(self.cache.path, error) from None
        self._compute(kind, todo, found)
        return [kind.stand_in if key is None else found[key] for key in keys]

    def _compute(self, kind: Kind[Q, A], todo: dict[str, tuple[Place, Q]], found: dict[str, A]) -> None:
        """Answer what is left to do, keep it, and say how far it is."""
        keys, questions = list(todo), [question for _, question in todo.values()]
        sizes = [kind.tokens(question) for question in questions]
        num_cached, total = len(found), len(found) + len(keys)
        start = told = time.monotonic()
        done = 0
        try:
            for index, answer in kind.compute(questions) if questions else ():
                found[keys[index]] = answer
                self.cache.put(keys[index], kind.dump(answer))
                done += sizes[index]
                now = time.monotonic()
                if now - told >= _TELL_S or len(found) == total:
                    told = now
                    share = done / sum(sizes)
                    self._on_progress(
                        Progress(
                            self._candidate.label, kind.what, len(found), total, num_cached, share, now - start
                        )
                    )
        except NotFinite as error:
            place, _ = todo[keys[error.pair]]
            where = f"{self._candidate.label}, {self.item_names(place)}"
            raise ArtifactError(str(error), where=where) from None
        except AnswerFailed as failed:
            place, _ = todo[keys[failed.prompt]]
            where = f"{self._candidate.label}, {self.item_names(place)}"
            raise ArtifactError(str(failed), where=where) from None
        except PromptRefused as refused:
            place, _ = todo[keys[refused.prompt]]
            raise UsageError(str(refused), where=self.item_names(place)) from None
        except EnvironmentProblem as error:
            if not self.cache.is_on:
                raise
            kept = f"{len(found)} of {total} answers are kept; the same command again goes on with the rest."
            hint = f"{error.hint} {kept}" if error.hint else kept
            raise EnvironmentProblem(error.what, where=error.where, accepted=error.accepted, hint=hint) from error
        finally:
            self.cache.flush()
