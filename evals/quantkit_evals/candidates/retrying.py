"""Requests to a server that may be busy, restarting or gone: tried again for a while, then one clear error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx

from quantkit.errors import EnvironmentProblem

TRIES = 6
SILENT = 2  # tries that may end without an answer in time: more would be hours
CONNECT_S = 15.0
FIRST_WAIT_S, MOST_WAIT_S = 0.5, 30.0
PASSING = {408, 409, 425, 429, 500, 502, 503, 504}  # of the moment, or of the server
_SHOWN = 300  # characters of an answer


class Retrying:
    """A client of one server.

    Args:
        base: its URL, with ``/v1``.
        sleep: for tests.
    """

    def __init__(
        self,
        base: str,
        *,
        api_key: str | None,
        timeout_s: float,
        sleep: Callable[[float], None] = time.sleep,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.base, self._sleep = base, sleep
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S))
        self._client = httpx.Client(headers=headers, timeout=timeout, transport=transport)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON that the server answers with; any thread may ask.

        Raises:
            EnvironmentProblem: it refuses, can't be reached or fails for too long, or answers no JSON.
        """
        url = f"{self.base}{path}"
        why, wait, silent = "", FIRST_WAIT_S, 0
        for attempt in range(TRIES):
            if attempt:
                self._sleep(wait)
                wait = min(2 * wait, MOST_WAIT_S)
            try:
                answer = self._client.request(method, url, json=body)
            except httpx.InvalidURL as error:
                raise EnvironmentProblem(f"is no URL: {error}", where=url) from None
            except httpx.DecodingError as error:
                raise EnvironmentProblem(f"the endpoint's answer can't be read: {error}", where=url) from None
            except httpx.TransportError as error:
                why = str(error) or type(error).__name__
                silent += isinstance(error, httpx.ReadTimeout)
                if silent == SILENT:
                    break
                continue
            if answer.status_code in PASSING:
                why = f"HTTP {answer.status_code}: {answer.text[:_SHOWN]}"
                wait = max(wait, _retry_after(answer))
                continue
            return _json(answer, url)
        times = attempt + 1
        raise EnvironmentProblem(f"the endpoint failed {times} times in a row, last with: {why}", where=url)


def _retry_after(answer: httpx.Response) -> float:
    try:
        return min(float(answer.headers.get("Retry-After", 0)), MOST_WAIT_S)
    except ValueError:  # a date
        return 0.0


def _json(answer: httpx.Response, url: str) -> Any:
    if not answer.is_success:
        raise EnvironmentProblem(
            f"the endpoint refuses with HTTP {answer.status_code}: {answer.text[:_SHOWN]}", where=url,
            hint="A key is read from the variable OPENAI_API_KEY." if answer.status_code in (401, 403) else None,
        )  # fmt: skip
    try:
        return answer.json()
    except (ValueError, RecursionError):
        raise EnvironmentProblem(f"the endpoint answers no JSON: {answer.text[:_SHOWN]}", where=url) from None
