"""Body of /v1/completions. Source: OpenAI's API reference, "Completions (legacy)"; fields of vLLM where named."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .fields import Only, Prompts
from .sampling import SamplingFields


class CompletionRequest(SamplingFields):
    """``add_special_tokens`` (vLLM): those that the tokenizer puts around a text, such as a start token."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=128, description="only equal to n")] | None = None
    add_special_tokens: bool | None = None
    suffix: Annotated[None, Only()] = None
