"""Bodies of /tokenize and /detokenize (vLLM's)."""

from __future__ import annotations

from pydantic import model_validator

from .chat import TemplateFields
from .fields import Body, Count, wrong
from .messages import Message


class TokenizeRequest(TemplateFields):
    """Of a text or of a chat."""

    messages: list[Message] | None = None
    model: str | None = None
    prompt: str | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise wrong("either prompt or messages is needed")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[Count]
