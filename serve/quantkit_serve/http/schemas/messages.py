"""A message of a chat, and the mapping that chat templates are given for it.

Contents in parts are joined by line ends, as vLLM does for templates that want one string. A call's arguments
travel as JSON text and reach the template as an object, which is what published templates print.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator
from pydantic import WithJsonSchema as Shown
from pydantic_core import from_json

from .fields import Body, Only, wrong


def _text(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong("must be a string or a list of text parts")
    texts: list[str] = []
    for at, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else None
            raise wrong(f"part {at} is {_kind(kind)}; only text parts are supported: "
                        '{"type": "text", "text": "..."}')  # fmt: skip
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise wrong(f'part {at} must have "type" and "text", a string, and nothing else')
        texts.append(part["text"])
    return "\n".join(texts)


def _kind(kind: Any) -> str:
    return f"of type {kind[:40]}" if isinstance(kind, str) else "without a type"


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_TEXT = [{"type": "string"}, {"type": "array", "items": _PART}]
Text = Annotated[str | None, BeforeValidator(_text), Shown({"anyOf": [*_TEXT, {"type": "null"}]})]


def _arguments(value: str) -> str:
    try:
        found = from_json(value or "{}", allow_inf_nan=False)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise wrong("must be a JSON object as text")
    return value


class CalledFunction(Body):
    name: str
    arguments: Annotated[str, AfterValidator(_arguments)]


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        arguments = from_json(self.function.arguments or "{}")
        called = {"name": self.function.name, "arguments": arguments}
        return {"type": self.type, "function": called} | ({} if self.id is None else {"id": self.id})


class Message(Body):
    """One for all roles, as templates know no others: what a role doesn't need is refused there.

    The fields that only null is accepted for are those that clients send back with an assistant's message.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: Annotated[None, Only()] = None
    audio: Annotated[None, Only()] = None
    annotations: Annotated[Any, Only([])] = None
    function_call: Annotated[None, Only()] = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        if self.role != "assistant":
            if self.content is None:
                raise wrong(f"a message of role {self.role} needs content")
            if self.tool_calls or self.reasoning_content is not None:
                raise wrong("tool_calls and reasoning_content belong to role assistant")
        elif self.content is None and not self.tool_calls:
            raise wrong("a message of role assistant needs content or tool_calls")
        if self.tool_call_id is not None and self.role != "tool":
            raise wrong("tool_call_id belongs to role tool")
        return self

    def for_template(self) -> dict[str, Any]:
        found: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                found[name] = value
        if self.tool_calls:
            found["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return found
