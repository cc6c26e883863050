"""What the HTTP side is started with."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quantkit.errors import UsageError

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#@]+")


@dataclass(frozen=True)
class HttpSettings:
    """Frozen; commands and tests make one.

    Attributes:
        api_keys: any of them opens what needs one; none: everything is open.
        served_names: what clients may call the model, the first is shown; empty: the model's own name.
        is_local: only this machine should reach it: without keys, it then answers to no foreign name (``hosts``).
        cors_origins: origins whose pages may call; empty: only pages from here.
        max_body_bytes: of a request; more is refused before it is read whole.
        max_choices: answers that one request may ask for, over all its prompts.
        request_timeout_s: seconds that an answer may take, waiting included; None: any.
        fingerprint: ``system_fingerprint`` of answers, e.g. the artifact's pair_id.

    Raises:
        UsageError: a name that is empty, or an origin that no browser sends.
    """

    api_keys: tuple[str, ...] = ()
    served_names: tuple[str, ...] = ()
    is_local: bool = False
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 8 << 20
    max_choices: int = 256
    request_timeout_s: float | None = None
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        if not all(name.strip() for name in self.served_names):
            raise UsageError("is empty", where="--served-model-name", accepted="what clients call the model")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise UsageError(
                    f"{origin!r} is no origin: browsers send scheme, host and port only",
                    where="--allow-origin", accepted="for example https://chat.example.com, or *",
                )  # fmt: skip
