"""Server-sent events from bytes that arrive in any pieces.

Source: WHATWG HTML, "Server-sent events", section 9.2.6 (interpreting an event stream). Of the fields only
``data`` matters here; an event that the end of the stream cuts off is dropped, as the standard says.
"""

from __future__ import annotations

from collections.abc import Iterator


class EventReader:
    """``feed`` pieces of a stream; it gives the data of each event that is complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._ends_in_cr = (
            False  # a line ended with \r at the end of a piece: a \n at the next one's start is its own
        )

    def feed(self, piece: bytes) -> Iterator[str]:
        """
        Raises:
            UnicodeDecodeError: a line is not UTF-8.
        """
        if self._ends_in_cr and piece:
            piece, self._ends_in_cr = piece.removeprefix(b"\n"), False
        self._ends_in_cr = piece.endswith(b"\r")
        text = (self._rest + piece).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = text.split(b"\n")
        for line in lines:
            if not line:
                if self._data:
                    yield "\n".join(self._data)
                self._data = []
                continue
            name, _, value = line.decode().removeprefix("\ufeff").partition(":")
            if name == "data":
                self._data.append(value.removeprefix(" "))
