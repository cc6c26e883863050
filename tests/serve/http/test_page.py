"""The page for people: its files, and what a browser makes of them."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantkit_serve.http.app import STATIC
from quantkit_serve.http.server import Server, listen
from quantkit_serve.http.settings import HttpSettings
from quantkit_serve.service import Figures

from .browser import CHROMIUM, Page
from .conftest import Client
from .fakes import SCRIPT, FakeService, make

PAGES = {**dict.fromkeys(range(8), "chatcmpl-a-0"), **dict.fromkeys(range(20, 24), "chatcmpl-b-0"), 40: "cached",
         41: "quarantined", 42: "shared"}  # fmt: skip
STEPS = tuple((0.05 * i, 0.04, "decode" if i % 5 else "prefill", 3, 3 if i % 5 else 256) for i in range(60))
FIGURES = Figures(
    num_waiting=2, num_running=5, num_pages=100, num_pages_used=42, prompt_tokens=900, generated_tokens=400,
    prefill_steps=12, decode_steps=48, kv_tag_checks=60, kv_tag_mismatches=1, finished={"stop": 7, "length": 2},
    pages=PAGES, steps=STEPS, findings=(("step", 21, "chatcmpl-c-0", ("chatcmpl-b-0",)),),
)  # fmt: skip


def test_nothing_comes_from_elsewhere(client: Client) -> None:
    for file in STATIC.iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.|@import|innerHTML|eval\(", text), file.name
        assert len(text.splitlines()) <= 300
    page = client.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    named = set(re.findall(r'(?:src|href)="(static/[^"]+)"', page.text))
    assert len(named) == 3
    for name in named:
        assert client.get("/" + name).status_code == 200
    assert client.get("/static/../app.py").status_code == 404


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    page = Page(tmp_path_factory.mktemp("profile"))
    yield page
    page.close()


class Running:
    """A server in a thread."""

    def __init__(self, settings: HttpSettings) -> None:
        self.service: FakeService
        self.service, app = make(settings)
        self.service.shown = FIGURES
        self._server = Server(app, drain_s=0, log_level="warning")
        ready = threading.Event()
        self.url = ""

        def on_ready(url: str) -> None:
            self.url = url
            ready.set()

        self._thread = threading.Thread(target=self._server.run_on, args=(listen("127.0.0.1", 0), on_ready))
        self._thread.start()
        assert ready.wait(20)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.request_drain()
        self._thread.join(20)


def test_what_a_visitor_sees(browser: Page) -> None:
    """Figures, the map by keyboard, a streamed chat; in both colour schemes, without a complaint."""
    with Running(HttpSettings()) as running:
        browser.open(running.url)
        browser.until("document.getElementById('status')?.textContent === 'running'")
        text = browser.value("document.body.innerText")
        for shown in (
            "tiny-glm",
            "12 / 48",
            "42 %",
            "7 / 2",
            "1 tag mismatch: a page was not",
            "chatcmpl-a-0: 8",
        ):
            assert shown in text, (shown, text)
        running.service.shown = dataclasses.replace(FIGURES, generated_tokens=4000)
        browser.until("/Now [1-9][0-9]* generated/.test(document.getElementById('speed-note').textContent)")
        browser.value("document.getElementById('pages').focus()")
        assert browser.value("document.getElementById('page-note').textContent") == "Page 0: chatcmpl-a-0"
        browser.press("ArrowRight")
        assert browser.value("document.getElementById('page-note').textContent") == "Page 1: chatcmpl-a-0"
        browser.value("document.getElementById('prompt').focus()")
        browser.write("<img src=x onerror=alert(1)>")
        browser.press("Enter", "\r")
        browser.until(f"document.getElementById('log').innerText.includes({SCRIPT!r})")
        assert "<img src=x" in browser.value("document.getElementById('log').innerText")
        (request,) = running.service.requests
        assert request.params.max_tokens == 128 and request.params.temperature == 0.7
        pictures = {}
        for scheme in ("light", "dark"):
            browser.prefer(scheme)
            browser.value("scrollTo(0, 0)")
            pictures[scheme] = browser.picture()
        assert pictures["light"] != pictures["dark"]
        for width in (360, 1200):
            browser.picture(width, 800)
            assert browser.value("document.documentElement.scrollWidth <= innerWidth")
        if folder := os.environ.get("PAGE_PICTURES"):
            for scheme, picture in pictures.items():
                (Path(folder) / f"page-{scheme}.png").write_bytes(picture)
    assert browser.complaints == []


def test_leaving_an_answer_and_a_server_that_goes(browser: Page) -> None:
    with Running(HttpSettings()) as running:
        running.service.endless = True
        browser.open(running.url)
        browser.until("document.getElementById('status')?.textContent === 'running'")
        browser.value("document.getElementById('prompt').focus()")
        browser.write("go")
        browser.press("Enter", "\r")
        browser.until("document.getElementById('log').innerText.includes('The river')")
        browser.value("document.getElementById('stop').click()")
        browser.until("document.getElementById('stop').disabled")
        for _ in range(500):
            if not running.service.live:
                break
            asyncio.run(asyncio.sleep(0.01))
        assert len(running.service.aborted) == 1
    browser.until("document.getElementById('status').textContent === 'not reachable'")
    browser.complaints.clear()


def test_a_key(browser: Page) -> None:
    with Running(HttpSettings(api_keys=("sk-1",))) as running:
        browser.open(running.url)
        browser.until("document.getElementById('status')?.textContent === 'needs an API key'")
        browser.value("document.getElementById('key').focus()")
        browser.write("sk-1")
        browser.until("document.getElementById('status').textContent === 'running'")
    browser.complaints.clear()
