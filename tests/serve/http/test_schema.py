"""The OpenAPI document, and a search through what it allows (and forbids) for anything that ends in 500."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance
from starlette.types import Receive, Scope, Send

from .conftest import Client
from .fakes import make

_, APP = make()


async def unstopped(scope: Scope, receive: Receive, send: Send) -> None:
    """The app, which the search would start and stop around every request."""
    if scope["type"] == "http":
        await APP(scope, receive, send)
        return
    for event in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{event}.complete"})


schema = schemathesis.openapi.from_asgi("/openapi.json", unstopped)


@schema.parametrize()
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_nothing_ends_in_500(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=[not_a_server_error, content_type_conformance, response_schema_conformance])


def test_the_document_tells_what_is_accepted(client: Client) -> None:
    document = client.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name}", "/tokenize", "/detokenize",
        "/health", "/version", "/metrics", "/live",
    }  # fmt: skip
    schemas = document["components"]["schemas"]
    chat = schemas["ChatRequest"]
    assert chat["additionalProperties"] is False and chat["required"] == ["messages"]
    assert chat["properties"]["functions"] == {"enum": [None], "title": "Functions"}
    assert {"400", "401", "404", "413", "429", "500", "503"} <= set(
        document["paths"]["/v1/chat/completions"]["post"]["responses"]
    )
