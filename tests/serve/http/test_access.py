"""Keys, origins, the gate."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.errors import UsageError
from quantkit_serve.http.keys import read_api_keys
from quantkit_serve.http.settings import HttpSettings

from .conftest import Client
from .fakes import make

KEYS = ("sk-one", "sk-two")
BODY = {"prompt": "a"}


@pytest.fixture(scope="module")
def locked() -> Client:
    return Client(make(HttpSettings(api_keys=KEYS))[1])


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer sk-one", 200), ("bearer sk-two", 200), ("Bearer  sk-two ", 200), ("", 401), ("Bearer", 401),
        ("Bearer ", 401), ("Bearer sk-", 401), ("Bearer sk-onex", 401), ("Basic sk-one", 401), ("sk-one", 401),
        ("Bearer sk-one,sk-two", 401), ("Bearer \xff\xfe", 401),
    ],
)  # fmt: skip
def test_keys(locked: Client, header: str, status: int) -> None:
    got = locked.post("/v1/completions", BODY, headers={"Authorization": header.encode("latin-1")})
    assert got.status_code == status
    if status == 401:
        assert got.json()["error"]["code"] == "invalid_api_key" and got.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/v1/models", "/live", "/nope", "/static/../live"])
def test_closed_without_a_key(locked: Client, path: str) -> None:
    assert locked.get(path).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version", "/openapi.json"])
def test_open_without_a_key(locked: Client, path: str) -> None:
    assert locked.get(path).status_code == 200


def test_a_body_without_a_key_is_not_read(locked: Client) -> None:
    assert locked.post("/v1/completions", content=b" " * 9_000_000).status_code == 401


def test_keys_of_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nsk-b\n\n sk-c \nsk-a\n")
    assert read_api_keys({"QUANTKIT_API_KEYS": "sk-a, sk-b,"}, file) == ("sk-a", "sk-b", "sk-c")
    assert read_api_keys({}) == ()


@pytest.mark.parametrize("content", ["", "# none\n", "sk with space", "schlüssel"])
def test_keys_that_cannot_be(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError):
        read_api_keys({}, file)
    with pytest.raises(UsageError):
        read_api_keys({}, tmp_path / "missing")


def test_other_origins_are_not_let_in_unless_named() -> None:
    ask = {"Origin": "https://there.example", "Access-Control-Request-Method": "POST"}
    closed = Client(make()[1])
    assert "access-control-allow-origin" not in closed.get("/health", headers=ask).headers
    settings = HttpSettings(api_keys=KEYS, cors_origins=("https://there.example",))
    let_in = Client(make(settings)[1])
    preflight = let_in.request("OPTIONS", "/v1/completions", headers=ask)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://there.example"
    refused = let_in.post("/v1/completions", BODY, headers={"Origin": "https://there.example"})
    assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers
    other = let_in.get("/health", headers={"Origin": "https://else.example"})
    assert "access-control-allow-origin" not in other.headers


def test_a_closed_gate() -> None:
    _, app = make()
    client = Client(app)
    app.state.context.gate.close()
    got = client.post("/v1/completions", BODY)
    assert got.status_code == 503 and got.headers["retry-after"]
    health = client.get("/health")
    assert health.status_code == 503 and health.json()["status"] == "draining"
    assert client.get("/metrics").status_code == client.get("/live").status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("localhost:8000", 200), ("LOCALHOST", 200), ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200), ("192.168.1.5", 200), ("evil.example", 421), ("evil.example:8000", 421),
        ("localhost.evil.example", 421), ("127.0.0.1.evil.example", 421), ("[::1", 421),
    ],
)  # fmt: skip
def test_a_local_server_answers_to_no_foreign_name(host: str, status: int) -> None:
    """A page whose name was made to point to this machine sends its own name."""
    got = Client(make(HttpSettings(is_local=True))[1]).get("/health", headers={"Host": host})
    assert got.status_code == status


def test_with_a_key_or_for_others_any_name_will_do() -> None:
    for settings in (HttpSettings(is_local=True, api_keys=KEYS), HttpSettings()):
        assert Client(make(settings)[1]).get("/health", headers={"Host": "served.example"}).status_code == 200


@pytest.mark.parametrize("origin", ["", "example.com", "https://example.com/", "https://", "https://a b", "**"])
def test_origins_that_no_browser_sends(origin: str) -> None:
    with pytest.raises(UsageError, match="--allow-origin"):
        HttpSettings(cors_origins=("https://example.com:8443", "*", origin))


@pytest.mark.parametrize("name", ["", " "])
def test_a_model_has_a_name(name: str) -> None:
    with pytest.raises(UsageError, match="--served-model-name"):
        HttpSettings(served_names=("tiny", name))
