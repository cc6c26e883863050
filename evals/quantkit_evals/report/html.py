"""The report as one self-contained page, plots as inline SVG: no script, nothing loaded from elsewhere.

The same input gives the same bytes: no clock, no host. It looks like the report of a conversion and shares its
style; what it says is ``content``, what it draws is ``figures``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from quantkit.artifact.attachments.calibration_html import table
from quantkit.artifact.attachments.report_html import STYLE

from .content import Section, Table, content, title, verdict_line
from .document import VERSION
from .figures import Figure, figures
from .report import Report
from .svg import safe
from .text import one_line

_STYLE = """
body{max-width:76rem}h1,h2,p,li{overflow-wrap:anywhere}th.n{text-align:right}th{vertical-align:bottom}td{vertical-align:top}
.wide{overflow-x:auto}.wide table{font-size:.9em}.identity td{overflow-wrap:anywhere}
.identity td:first-child{overflow-wrap:normal;white-space:nowrap}
.verdict{border-left:.4rem solid;padding:.6rem 1rem;font-size:1.1rem}
.is-pass{border-color:#1a7f37}.is-fail{border-color:#cf222e}.is-undecided{border-color:#9a6700}
.is-measured{border-color:#57606a}
figure{margin:1.5rem 0}figcaption{font-weight:600}
details{margin:.3rem 0 1rem}summary{cursor:pointer}
.v{stroke:#57606a;stroke-width:2;fill:#57606a}.v.pass{stroke:#1a7f37;fill:#1a7f37}
.v.fail{stroke:#cf222e;fill:#cf222e}.v.undecided{stroke:#9a6700;fill:#fff}
.zero{stroke:#57606a}.limit{stroke:#cf222e;stroke-width:2;stroke-dasharray:3 2}
.lost{fill:#c2410c}.gained{fill:#2f6fde}
.s{stroke-width:2}polyline.s{fill:none}.d1{stroke-dasharray:5 3}
.s0{stroke:#2f6fde;fill:#2f6fde}.s1{stroke:#c2410c;fill:#c2410c}.s2{stroke:#1a7f37;fill:#1a7f37}
.s3{stroke:#8250df;fill:#8250df}.s4{stroke:#9a6700;fill:#9a6700}.s5{stroke:#57606a;fill:#57606a}
@media(prefers-color-scheme:dark){.is-pass{border-color:#3fb950}.is-fail{border-color:#f85149}
.is-undecided{border-color:#d29922}.v{stroke:#8b949e;fill:#8b949e}.v.pass{stroke:#3fb950;fill:#3fb950}
.v.fail{stroke:#f85149;fill:#f85149}.v.undecided{stroke:#d29922;fill:#0d1117}.zero{stroke:#8b949e}
.limit{stroke:#f85149}.lost{fill:#fb923c}.gained{fill:#6ea8fe}
.s0{stroke:#6ea8fe;fill:#6ea8fe}.s1{stroke:#fb923c;fill:#fb923c}.s2{stroke:#3fb950;fill:#3fb950}
.s3{stroke:#bc8cff;fill:#bc8cff}.s4{stroke:#d29922;fill:#d29922}.s5{stroke:#8b949e;fill:#8b949e}}
@media print{details>*{display:revert}body{max-width:none}}
"""
_NUMBER = re.compile(r"[^ ]+ ± [^ ]+( [^ ]+)?|\([^ ]+ to [^ ]+\)|^[-+.,0-9]+ [^ ]+")  # that a table does not break
_IDENTITY = ("compared", "settings", "tasks")


def html(report: Report) -> bytes:
    """The page, UTF-8."""
    name = title(report)
    outcome = report.outcome.value
    word, _, said = verdict_line(report).partition(": ")
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{safe(name)}</title><style>{STYLE}{_STYLE}</style>",
        f"<h1>{safe(name)}</h1>",
        f'<p class="verdict is-{outcome}"><strong>{safe(word)}</strong>: {safe(said)}</p>',
    ]
    is_drawn = False
    for section in content(report):
        if section.key == "compared" and not is_drawn:  # figures first, then what they are of
            drawn = [_figure(figure) for figure in figures(report)]
            parts += ["<h2>Plots</h2>", *drawn] if drawn else []
            is_drawn = True
        parts += _section(section)
    parts.append(f"<p>Figures unrounded: the JSON document beside this page (version {VERSION}).</p>")
    return "\n".join(parts).encode() + b"\n"


def _section(section: Section) -> Iterator[str]:
    yield f"<h2>{safe(section.title)}</h2>"
    if section.table is not None:
        yield f'<div class="{"identity" if section.key in _IDENTITY else "wide"}">{_table(section.table)}</div>'
    if section.lines:
        yield "<ul>" + "".join(f"<li>{safe(line)}</li>" for line in section.lines) + "</ul>"


def _unbroken(match: re.Match[str]) -> str:
    return match[0].replace(" ", "\u00a0")


def _figure(figure: Figure) -> str:
    return (
        f"<figure><figcaption>{safe(figure.title)}</figcaption><p>{safe(figure.note)}</p>{figure.svg}"
        f'<details><summary>The numbers</summary><div class="wide">{_table(figure.table)}</div></details></figure>'
    )


def _table(found: Table) -> str:
    rows = [[_NUMBER.sub(_unbroken, safe(cell)) for cell in row] for row in found.rows]
    return table([one_line(name) for name in found.columns], rows, len(rows), most=max(len(rows), 1))
