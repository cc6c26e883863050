"""Body of /v1/chat/completions. Source: OpenAI's API reference, "Chat"; fields of vLLM where named."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .fields import Body, Only
from .messages import Message
from .sampling import MAX_INT, SamplingFields

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Function(Body):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[bool, Only(False)] = False


class Tool(Body):
    type: Literal["function"]
    function: Function


class TemplateFields(Body):
    """What the chat template gets besides messages; vLLM's fields, but for tools."""

    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    continue_final_message: Annotated[bool, Only(False)] = False
    chat_template: Annotated[None, Only()] = None
    documents: Annotated[None, Only()] = None


class ChatRequest(TemplateFields, SamplingFields):
    """``tool_choice`` none keeps the tools out of the prompt; calls stay in the text as the model writes them."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(le=MAX_INT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    reasoning_effort: Effort | None = None

    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    parallel_tool_calls: Annotated[bool, Only(True)] = True
    audio: Annotated[None, Only()] = None
    function_call: Annotated[None, Only()] = None
    functions: Annotated[None, Only()] = None
    prediction: Annotated[None, Only()] = None
    verbosity: Annotated[None, Only()] = None
    web_search_options: Annotated[None, Only()] = None
    prompt_cache_retention: Annotated[None, Only()] = None
    echo: Annotated[bool, Only(False)] = False
    mm_processor_kwargs: Annotated[None, Only()] = None
