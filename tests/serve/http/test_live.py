"""The document behind the page for people."""

from __future__ import annotations

from quantkit_serve.http.live import page_map
from quantkit_serve.service import Figures

from .conftest import Client
from .fakes import FakeService


def test_a_cell_for_a_page() -> None:
    found = page_map(6, {1: "a", 2: "b", 4: "a", 5: "cached"})
    assert found == {"count": 6, "per_cell": 1, "owners": ["a", "b", "cached"], "cells": [-1, 0, 1, -1, 0, 2]}


def test_large_pools_share_cells_and_quarantine_shows() -> None:
    found = page_map(10, {0: "a", 1: "b", 3: "a", 4: "quarantined", 9: "c"}, max_cells=4)
    assert found["per_cell"] == 3
    names = [None if cell < 0 else found["owners"][cell] for cell in found["cells"]]
    assert names == ["a", "quarantined", None, "c"]
    assert len(page_map(10**6, {5: "a"})["cells"]) <= 2048
    assert page_map(0, {})["cells"] == []


def test_the_document(client: Client, service: FakeService) -> None:
    service.shown = Figures(
        num_pages=3, num_running=1, pages={1: "r-0"}, steps=((0.5, 0.01, "prefill", 1, 9),), kv_tag_mismatches=2
    )
    got = client.get("/live").json()
    assert got["figures"]["num_running"] == 1 and got["figures"]["kv_tag_mismatches"] == 2
    assert got["pages"]["cells"] == [-1, 0, -1] and got["pages"]["owners"] == ["r-0"]
    assert got["steps"] == [[0.5, 0.01, "prefill", 1, 9]]
    assert got["is_ok"] is True and got["has_tags"] is True and got["model"] == "tiny-glm"
