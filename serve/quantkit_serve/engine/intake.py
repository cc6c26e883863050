"""From a request to a sequence: what is only known when it comes, and what is set up for its answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from ..refusal import Refused
from ..request import Grammar, Request
from .detokenizer import Detokenizer
from .grammar import Compiler, Matcher
from .sequence import Sequence
from .speculation import Speculation
from .vocabulary import Vocabulary


class Intake:
    """Makes sequences, in the order of arrival.

    Args:
        vocabulary: of the tokenizer.
        compiler: of grammars; None refuses them.
        speculation: None: off.
        clock: seconds, of deadlines.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        compiler: Compiler | None,
        speculation: Speculation | None,
        clock: Callable[[], float],
    ) -> None:
        self._vocabulary, self._compiler, self._speculation, self._clock = vocabulary, compiler, speculation, clock
        self._num_arrived = 0

    def compile(self, grammar: Grammar) -> Matcher:
        """May take a second; needs no lock.

        Raises:
            Refused: see ``Compiler.compile``.
        """
        if self._compiler is None:
            raise Refused("this server enforces no grammars", param=grammar.param)
        return self._compiler.compile(grammar)

    def sequence(self, request: Request, matcher: Matcher | None) -> Sequence:
        """The next one to arrive; ``matcher`` if it has a grammar."""
        params = request.params
        found = Sequence(
            request,
            arrival=self._num_arrived,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            detokenizer=Detokenizer(self._vocabulary, params.stop),
            deadline=None if request.deadline_s is None else self._clock() + request.deadline_s,
            matcher=matcher,
            is_speculative=self._speculation is not None and self._speculation.takes(params),
        )
        self._num_arrived += 1
        return found
