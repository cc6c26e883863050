"""Runs the app on a socket with uvicorn, one process, and drains on SIGTERM or SIGINT.

uvicorn alone stops listening at once, so that whoever asks for its health while answers finish gets no answer.
Here the socket stays open: new work and /health are told 503, running answers finish, and only then the server
leaves. A second signal, or the end of the time given, ends what still runs.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from quantkit.errors import EnvironmentProblem

from .context import Context

ABORTED_S = 2.0  # for clients to be told that their answer was ended
KEEP_ALIVE_S = 30


def listen(host: str, port: int) -> socket.socket:
    """
    Args:
        port: 0 takes a free one.

    Raises:
        EnvironmentProblem: the address can't be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise EnvironmentProblem(
            f"can't listen: {error}", where=f"{host}:{port}", hint="Choose another --host or --port."
        ) from None


def address(listening: socket.socket) -> str:
    """URL of a socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Server.

    Args:
        app: made by ``create_app``.
        drain_s: seconds that running answers get after the first signal.
    """

    def __init__(self, app: FastAPI, *, drain_s: float = 30.0, log_level: str = "info") -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="on",
                access_log=False,
                server_header=False,
                log_level=log_level,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._context: Context = app.state.context
        self._drain_s = drain_s
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def run_on(self, listening: socket.socket, on_ready: Callable[[str], None] = lambda url: None) -> None:
        """Serve until a signal; ``on_ready`` gets the URL once requests are answered.

        Raises:
            EnvironmentProblem: the engine did not start.
        """
        try:
            asyncio.run(self._run(listening, on_ready))
        except SystemExit:  # uvicorn's way to say so, after it has logged why
            raise EnvironmentProblem("the server did not start; its log says why") from None

    async def _run(self, listening: socket.socket, on_ready: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        serving = asyncio.ensure_future(self.serve([listening]))
        while not (self.started or serving.done()):
            await asyncio.sleep(0.01)
        if self.started:
            on_ready(address(listening))
        await serving

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """At a signal; on the main thread, anywhere in its code."""
        if self._loop is None or not self.started:
            self.should_exit = True
        else:
            self.request_drain()

    def request_drain(self) -> None:
        """Take no more and leave when all is answered; a second call ends what runs. From any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._start_drain)

    def _start_drain(self) -> None:
        if self._drain is None:
            self._drain = asyncio.ensure_future(self._drained(self._drain_s))
        else:
            self._drain.cancel()
            self._drain = asyncio.ensure_future(self._drained(0.0))

    async def _drained(self, seconds: float) -> None:
        gate = self._context.gate
        gate.close()
        if not await gate.emptied(seconds):
            await self._context.stop()
            await gate.emptied(ABORTED_S)
        self.should_exit = True
