"""Answers kept on disk, keyed by what was asked of whom, so that a run that was killed goes on.

One SQLite file, only ever added to. Answers are written a few at a time, each group in a transaction: what a kill
-9 loses are those of the last moment, which are made again. A key is the SHA-256 of the candidate's identity
(digests of weights, configuration, versions; sizes and times of its files), the kind of request and its content,
so an answer of another model, configuration or build is never found.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from quantkit.errors import ArtifactError, EnvironmentProblem

FILE = "responses.sqlite"
_HELD = 256  # answers
_HELD_S = 1.0
_TIMEOUT_S = 60.0
_PAUSE_S = 0.02
_TAKEN = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_ELSEWHERE = "Keep them elsewhere (--cache DIR), or none (--no-cache)."


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/quantkit/evals``, by default below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "quantkit" / "evals"


class ResponseCache:
    """Answers of one candidate.

    Args:
        folder: where the file is, or will be; None keeps nothing.
        identity: of the candidate, JSON-ready; its label doesn't count.

    Attributes:
        num_found: answers that were there.
        path: of the file; None if nothing is kept.

    Raises:
        EnvironmentProblem: the folder can't be written to.
        ArtifactError: the file is something else.
    """

    def __init__(self, folder: Path | None, identity: Mapping[str, Any]) -> None:
        content = {name: value for name, value in identity.items() if name != "label"}
        self._identity = json.dumps(content, sort_keys=True).encode()
        self._held: list[tuple[str, str]] = []
        self._written = time.monotonic()
        self.num_found = 0
        self.path = None if folder is None else folder / FILE
        self._base = None if self.path is None else _open(self.path)

    @property
    def is_on(self) -> bool:
        return self.path is not None

    def key(self, kind: str, content: Any) -> str:
        """Of a request; ``content`` is JSON-ready."""
        digest = hashlib.sha256(self._identity)
        digest.update(
            json.dumps([kind, content], sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
        )
        return digest.hexdigest()

    def get(self, key: str) -> Any:
        """The answer, JSON-ready; None if there is none.

        Raises:
            ArtifactError: the file is damaged.
        """
        if self._base is None:
            return None
        try:
            row = self._base.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
            found = None if row is None else json.loads(row[0])
        except sqlite3.OperationalError as error:
            raise EnvironmentProblem(f"kept answers can't be read: {error}", where=str(self.path)) from None
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            raise damaged(self.path, error) from None
        self.num_found += row is not None
        return found

    def put(self, key: str, answer: Any) -> None:
        """Keep an answer; it is on disk within a second or so."""
        if self._base is None:
            return
        self._held.append((key, json.dumps(answer)))
        if len(self._held) >= _HELD or time.monotonic() - self._written >= _HELD_S:
            self.flush()

    def flush(self) -> None:
        """
        Raises:
            EnvironmentProblem: the disk refuses.
        """
        if self._base is not None and self._held:
            try:
                with self._base:
                    self._base.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?)", self._held)
            except sqlite3.Error as error:
                raise EnvironmentProblem(
                    f"answers can't be kept: {error}", where=str(self.path), hint=_ELSEWHERE
                ) from None
            self._held.clear()
        self._written = time.monotonic()

    def __enter__(self) -> ResponseCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What is held is written even if something failed: it is right."""
        if self._base is not None:
            self.flush()
            self._base.close()
            self._base = None


def check_cache(folder: Path | None) -> None:
    """That answers can be kept; asked before anything is measured.

    Raises:
        EnvironmentProblem, ArtifactError: see ``ResponseCache``.
    """
    if folder is not None:
        _open(folder / FILE).close()


def damaged(path: Path | None, error: Exception) -> ArtifactError:
    """What is said of a file that is something else."""
    return ArtifactError(
        f"is not a file of kept answers ({error})", where=str(path), hint="Delete it; answers are made again."
    )


def _open(path: Path) -> sqlite3.Connection:
    """Waits for others who are beginning or ending with the file: SQLite's own timeout doesn't cover the change to
    write-ahead logging, nor its end with the last connection."""
    end = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return _begun(path)
        except OSError as error:
            raise EnvironmentProblem(
                f"answers can't be kept here ({error.strerror})", where=str(path.parent), hint=_ELSEWHERE
            ) from None
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF in _TAKEN and time.monotonic() < end:
                time.sleep(_PAUSE_S)
                continue
            raise EnvironmentProblem(
                f"answers can't be kept here ({error})", where=str(path), hint=_ELSEWHERE
            ) from None
        except sqlite3.DatabaseError as error:
            raise damaged(path, error) from None


def _begun(path: Path) -> sqlite3.Connection:
    base = sqlite3.connect(path, timeout=_TIMEOUT_S)
    try:
        base.execute("PRAGMA journal_mode = WAL")
        base.execute("PRAGMA synchronous = NORMAL")  # a power cut may lose the last moment, never the file
        base.execute(
            "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL) WITHOUT ROWID"
        )
        base.commit()
        base.execute("INSERT OR IGNORE INTO answers VALUES ('', '')")  # what can only be read says so here
        base.rollback()
    except sqlite3.Error:
        base.close()
        raise
    return base
