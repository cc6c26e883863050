"""How results are laid out for people: plain text and tables, no calculation.

One function per kind of result, each yields the blocks that ``Console.result`` prints. The same result as data is
its ``to_json``; nothing is shown here that is not in there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..units import format_bytes, format_gib
from .console import Block, Table

if TYPE_CHECKING:
    from quantkit.artifact import Check, VerifyReport
    from quantkit.inspection.diff import Difference
    from quantkit.inspection.inspect import Inspection, Share
    from quantkit.inspection.stats import TensorStatistics

_BAR_CELLS = 40


def environment(report: Mapping[str, Any]) -> Iterator[Block]:
    """``quantkit env``: one line per fact."""
    yield f"python     {report['python']['version']} ({report['python']['executable']})"
    yield f"platform   {report['platform']}"
    yield "packages   " + ", ".join(f"{n} {v or '(absent)'}" for n, v in report["packages"].items())
    yield from _kernels(report["kernels"])
    cpu = report["cpu"]
    yield f"cpu        {cpu['model']}, {cpu['usable_cores']} of {cpu['cores']} cores usable"
    yield f"           {' '.join(cpu['features']) or 'no known features'}"
    memory = {k: format_gib(v) if v else "unknown" for k, v in report["memory"].items()}
    limit = f", limited to {memory['limit_bytes']}" if report["memory"]["limit_bytes"] else ""
    yield f"memory     {memory['available_bytes']} of {memory['total_bytes']} available{limit}"
    yield f"disk       {format_bytes(report['disk']['free_bytes'])} free in {report['disk']['path']}"
    yield f"hub        cache {report['hub']['cache']}, {'a' if report['hub']['token'] else 'no'} token"
    yield "settings   " + (", ".join(f"{k}={v}" for k, v in report["settings"].items()) or "none")


def _kernels(kernels: Mapping[str, Any]) -> Iterator[str]:
    """Which backend converts, then each there is and why one is off."""
    problem = kernels.get("problem")
    forced = f", forced by QUANTKIT_KERNELS={kernels['forced']}" if kernels.get("forced") else ""
    yield f"kernels    {problem}" if problem else f"kernels    {kernels['name']} in use{forced}"
    for name, found in kernels.get("backends", {}).items():
        facts = {k: v for k, v in found.items() if k != "why_not" and v not in (None, [])}
        said = [f"off: {found['why_not']}"] if found["why_not"] else []
        yield f"  {name:8} " + ", ".join([*said, *(f"{k} {_short(v)}" for k, v in facts.items())])


def _short(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def inspection(found: Inspection) -> Iterator[Block]:
    """``quantkit inspect``: what it is, then sizes."""
    if found.what == "artifact":
        yield from _artifact(found)
        for name, view in found.views.items():
            yield ""
            yield f"--- {name} view"
            yield from _checkpoint(view)
    else:
        yield f"{found.label}: {found.what}" + (f" ({found.kind})" if found.kind != "local" else "")
        yield from _checkpoint(found)


def _artifact(found: Inspection) -> Iterator[Block]:
    manifest = found.manifest or {}
    source = manifest.get("source", {})
    yield f"{found.label}: dual-precision artifact, format version {manifest.get('format_version')}"
    yield f"source     {source.get('label') or '(a local checkpoint)'} {found.revision or ''}".rstrip()
    yield f"family     {found.family}"
    yield f"pair       {found.pair_id}"
    decode = manifest.get("recipe", {}).get("decode", {})
    yield "decode     " + ", ".join(f"{k}={_short(v)}" for k, v in decode.items() if v not in (None, []))
    views = manifest.get("views", {})
    rows = [
        [n, v["origin"], v["stored"], f"{v['num_tensors']:,}", format_bytes(v["nbytes"])] for n, v in views.items()
    ]
    yield Table("Views", ("view", "made by", "bytes", ">tensors", ">size"), rows)


def _checkpoint(found: Inspection) -> Iterator[Block]:
    if found.revision:
        yield f"revision   {found.revision}"
    yield f"family     {found.family or 'not recognised'} (model_type {found.model_type or 'not given'})"
    if found.layers:
        mtp = f" + {found.mtp_layers} multi-token-prediction" if found.mtp_layers else ""
        yield f"layers     {found.layers}{mtp}, {found.experts} routed experts"
    if found.pair_id and found.what != "artifact":
        yield f"pair       {found.pair_id}"
    yield f"size       {format_bytes(found.nbytes)} in {found.tensors:,} tensors, {found.files:,} files"
    if found.by_role:
        yield _shares("By role", found.by_role, found.nbytes)
    yield _shares("By dtype", found.by_dtype, found.nbytes)
    yield _shares("By storage of the weights", found.by_storage, found.nbytes)


def _shares(title: str, shares: Iterable[Share], total: int) -> Table:
    rows = [
        [s.name, f"{s.tensors:,}", format_bytes(s.nbytes), f"{100 * s.nbytes / max(total, 1):.1f} %"]
        for s in shares
    ]
    return Table(title, ("", ">tensors", ">size", ">share"), rows)


def statistics(found: TensorStatistics) -> Iterator[Block]:
    """``quantkit inspect --tensor``: numbers, then the histogram as bars."""
    yield f"{found.name}: {found.storage}, {found.dtype} {list(found.shape)}, {format_bytes(found.nbytes)}"
    for name, file in found.parts:
        yield f"  {name}  in {file}"
    yield f"values     {found.count:,}: {found.zeros:,} zeros, {found.nan:,} NaN, {found.inf:,} infinite"
    if found.minimum is None or found.maximum is None:
        return
    yield f"range      {found.minimum:.6g} to {found.maximum:.6g}"
    yield f"moments    mean {found.mean:.6g}, standard deviation {found.std:.6g}, rms {found.rms:.6g}"
    yield ""
    width = (found.maximum - found.minimum) / len(found.histogram)
    largest = max(found.histogram)
    for number, count in enumerate(found.histogram):
        bar = "█" * round(_BAR_CELLS * count / largest)
        if count and not bar:
            bar = "▏"
        yield f"{found.minimum + number * width:>12.4g}  {bar:<{_BAR_CELLS}}  {count:,}"


def difference(found: Difference, limit: int | None) -> Iterator[Block]:
    """``quantkit diff``: the counts, then the changes, the largest error first; ``limit`` rows at most."""
    yield f"a: {found.a}"
    yield f"b: {found.b}"
    same = f"{found.unread:,} of the same name, dtype and shape (data not read)" if found.unread else ""
    same = same or f"{found.identical:,} weights and tensors identical"
    counts = ", ".join(f"{found.count(s):,} {s}" for s in ("changed", "added", "removed"))
    yield f"{same}, {counts}"
    if not found.changes:
        return
    order = sorted(found.changes, key=lambda c: (-(c.relative_error or 0), c.name))
    rows = [
        [c.status, c.name, c.before or "", c.after or "", _figure(c.relative_error), _figure(c.max_error)]
        for c in order[:limit]
    ]
    yield Table("Changes", ("", "name", "a", "b", ">relative error", ">max error"), rows)
    if len(rows) < len(order):
        yield f"... and {len(order) - len(rows):,} more; -v shows all"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def verification(report: VerifyReport) -> Iterator[Block]:
    """``quantkit verify``: one line per check, then the verdict."""
    rows = [[_verdict(c), c.name, c.detail, c.where or ""] for c in report.checks]
    yield Table("Checks", ("", "check", "found", "where"), rows)
    failed, skipped = sum(not c.ok for c in report.checks), sum(c.skipped for c in report.checks)
    if not report.ok:
        yield f"not verified: {failed} of {len(rows)} checks failed"
    elif skipped:
        yield f"verified as far as asked: {len(rows) - skipped} checks passed, {skipped} not made"
    else:
        yield "verified: every check passed"


def _verdict(check: Check) -> str:
    if check.skipped:
        return "--"
    return "ok" if check.ok else "FAILED"


def converted(result: Mapping[str, Any]) -> Iterator[Block]:
    """``quantkit convert``: what was made."""
    yield result["artifact"]
    rows = [
        [name, view["origin"], view["stored"], f"{view['num_tensors']:,}", format_bytes(view["nbytes"])]
        for name, view in result["views"].items()
    ]
    yield Table("Views", ("view", "made by", "bytes", ">tensors", ">size"), rows)
    yield f"pair       {result['pair_id']}"


def recipe_list(recipes: Iterable[Any]) -> Iterator[Block]:
    """``quantkit recipes list``."""
    rows = [[r.name, r.source.repo or "", r.description] for r in recipes]
    yield Table("Recipes", ("name", "source", "what it does"), rows)
