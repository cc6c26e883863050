"""What a caller is told of a request, from the request's state."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from ..paging import Mismatch
from ..request import Output, TokenLogprob
from .answering import Answered
from .sequence import Sequence


def output(
    sequence: Sequence,
    answered: Answered,
    error: str | None = None,
    *,
    tokens: SequenceOf[int] = (),
    logprobs: SequenceOf[TokenLogprob] = (),
) -> Output:
    """The next output of a request; the prompt's logprobs go with the first one that can have them.

    Args:
        tokens, logprobs: new ones.
    """
    prompt_logprobs = None
    if sequence.prompt_logprobs and not sequence.has_prompt_logprobs_due and not sequence.is_prompt_reported:
        prompt_logprobs = tuple(sequence.prompt_logprobs)
        sequence.is_prompt_reported = True
    return Output(
        sequence.request_id,
        token_ids=tuple(tokens),
        text=answered.text,
        logprobs=tuple(logprobs),
        prompt_logprobs=prompt_logprobs,
        finish=answered.finish,
        stop_reason=answered.stop_reason,
        error=error,
        num_prompt_tokens=sequence.num_prompt,
        num_cached_tokens=sequence.num_cached,
        num_generated_tokens=sequence.num_generated,
    )


def mismatch_error(found: Mismatch) -> str:
    """Why a request was ended whose table does not have the pages that it was given."""
    return (
        f"KV page check failed: entry {found.entry} is page {found.page} with tag {found.found_tag}, "
        f"expected page {found.expected.page} with tag {found.expected.tag}; the request was ended before "
        "anything was computed from it"
    )
