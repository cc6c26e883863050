"""How tokens are chosen: OpenAI's fields and vLLM's, shared by chat and completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from .fields import Body, Count, Only, Strings
from .output import OutputFields

MAX_INT = (1 << 63) - 1


class StreamOptions(Body):
    """``include_usage``: a last chunk with it; ``continuous_usage_stats`` (vLLM): every chunk with it."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[bool, Only(False)] = False


class SamplingFields(OutputFields):
    """Absent or null is the default everywhere."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(le=MAX_INT)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT, description="0 and -1 keep all")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-MAX_INT - 1, le=MAX_INT)] | None = None
    stop: Strings = None
    stop_token_ids: list[Count] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None

    # Accepted, and without effect: they describe the caller, or concern what this server never does.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Annotated[bool, Only(False)] = False

    # Known to other servers.
    use_beam_search: Annotated[bool, Only(False)] = False
    length_penalty: Annotated[Any, Only(1.0)] = 1.0
    early_stopping: Annotated[bool, Only(False)] = False
    include_stop_str_in_output: Annotated[bool, Only(False)] = False
    skip_special_tokens: Annotated[bool, Only(True)] = True
    spaces_between_special_tokens: Annotated[bool, Only(True)] = True
    truncate_prompt_tokens: Annotated[None, Only()] = None
    prompt_logprobs: Annotated[None, Only()] = None
    priority: Annotated[int, Only(0)] = 0
    allowed_token_ids: Annotated[None, Only()] = None
    bad_words: Annotated[None, Only()] = None
    logits_processors: Annotated[None, Only()] = None
    return_tokens_as_token_ids: Annotated[bool, Only(False)] = False
    kv_transfer_params: Annotated[None, Only()] = None
