"""docs/cli.md and docs/recipes.md are what the program says today."""

from __future__ import annotations

from quantkit.cli.docs import ROOT, main, pages
from quantkit.cli.main import COMMANDS


def test_pages_are_fresh() -> None:
    stale = [p.name for p, text in pages().items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    assert not stale, f"stale: {stale}; run `make docs`"
    assert main(["--check"]) == 0


def test_every_command_is_described() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert all(f"quantkit {name}" in page for name in COMMANDS)
