"""Any text becomes one line that XML, UTF-8 and a Markdown table can hold."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st
from lxml import etree

from quantkit_evals.report.annotations import command
from quantkit_evals.report.markdown import escape
from quantkit_evals.report.text import one_line

ANY = st.text(st.characters(codec=None, exclude_categories=()), max_size=40)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(ANY)
def test_one_line(text: str) -> None:
    found = one_line(text)
    found.encode()
    assert len(found.splitlines()) <= 1
    element = etree.Element("a", b=found)  # raises for what XML can't hold
    element.text = found
    again = etree.fromstring(etree.tostring(element))
    assert ((again.text or ""), again.get("b")) == (found, found)
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", escape(text))) == 0
    line = command("error", text, text)
    line.encode()
    assert len(line.splitlines()) == 1 and line.split("::")[1].count(":") == 0
