"""Random arrivals, lengths, shared prompts and aborts in a small pool: no crossed answer, no lost page."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quantkit_serve.batch import Batch
from quantkit_serve.engine.sampler import Draw, sample
from quantkit_serve.request import FinishReason, Request
from tests.serve.engine.fake import VOCAB, Answers, alone, config, drain, engine, held, request
from tests.serve.engine.proposing import mixed, proposing

PAGE_SIZE = 4
STEMS = [tuple((7 * i + j) % VOCAB for j in range(14)) for i in range(3)]

prompts = st.one_of(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
    st.tuples(st.sampled_from(STEMS), st.integers(1, 14), st.lists(st.integers(0, VOCAB - 1), max_size=4)).map(
        lambda t: [*t[0][: t[1]], *t[2]]
    ),
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), prompts, st.integers(0, 14)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("steps"), st.integers(1, 6), st.none()),
    ),
    min_size=1,
    max_size=40,
)


def expected(one: Request) -> list[int]:
    def choose(logits: NDArray[np.float32], position: int) -> int:
        (token,) = sample(logits[None], [Draw(one.params, one.params.seed or 0, position)])
        assert token is not None
        return token

    return alone(one, choose)


@settings(max_examples=60, deadline=None)
@given(
    actions=actions,
    pages=st.integers(9, 24),
    chunk=st.integers(1, 24),
    seqs=st.integers(1, 6),
    between=st.integers(1, 3),
    deterministic=st.booleans(),
    prefix=st.booleans(),
    drafts=st.integers(0, 3),
)
def test_each_answer_is_that_of_the_request_alone(
    actions, pages, chunk, seqs, between, deterministic, prefix, drafts
) -> None:  # type: ignore[no-untyped-def]
    chosen = config(
        pages=pages,
        page_size=PAGE_SIZE,
        prefix=prefix,
        deterministic=deterministic,
        max_num_batched_tokens=chunk,
        max_num_seqs=seqs,
        decode_steps_between_chunks=between,
    )
    core, runner = proposing(mixed, chosen, drafts) if drafts else engine(chosen)
    requests: list[Request] = []
    answers = Answers()
    pending: list[str] = []

    def abort(batch: Batch | None = None) -> None:
        while pending:
            if (output := core.abort(pending.pop())) is not None:
                answers.add([output])

    runner.before = abort
    for kind, value, more in actions:
        if kind == "add":
            seed = len(requests)  # every other one draws
            requests.append(request(f"r{seed}", value, more, temperature=float(seed % 2), seed=seed))
            core.add(requests[-1])
        elif kind == "abort" and requests:
            pending.append(requests[value % len(requests)].request_id)
            if more:  # else in the middle of the next step
                abort()
        elif kind == "steps":
            for _ in range(value):
                answers.add(core.step())
                core.pool.check_integrity(held(core))
    drain(core, answers)
    for one in requests:
        whole, found = expected(one), answers.tokens[one.request_id]
        if answers.last[one.request_id].finish is FinishReason.ABORT:
            assert found == whole[: len(found)]
        else:
            assert found == whole
    counts = core.pool.counts()
    assert counts.free + counts.cached == pages
