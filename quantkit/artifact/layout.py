"""Names and versions of everything on disk; no other module spells them.

``FORMAT_VERSION`` counts changes of the layout that an older reader would misread; an artifact states the lowest
version that describes it, so one without folds is what it was before there were any. ``NUMERICS_VERSION`` counts
changes of what the same source and recipe are turned into: it enters ``pair_id``, so that two views made by
different numerics are never taken for a pair. See docs/format.md.
"""

from __future__ import annotations

FORMAT_VERSION = 1  # without folds
FOLDS_FORMAT_VERSION = 2  # with: an older reader would hold the folded weights against the source's
NEWEST_FORMAT_VERSION = FOLDS_FORMAT_VERSION
NUMERICS_VERSION = 1

MANIFEST = "manifest.json"
TENSORS = "tensors.jsonl"
DECODE = "decode"
PREFILL = "prefill"
VIEWS = (PREFILL, DECODE)
FOLDS = "folds"
VIEW_FILE = "quantkit_view.json"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"

MODEL_CARD = "README.md"
ATTACHMENTS = "attachments"
ATTACHMENT_LIST = "attachments.json"
PROVENANCE = "provenance.intoto.json"
REPORT_JSON = "report.json"
REPORT_HTML = "report.html"

PARTIAL_SUFFIX = ".partial"  # the working directory is a sibling of the target, so that the last rename is atomic
UNFINISHED_SUFFIX = ".unfinished"  # a file whose bytes are not all there yet
JOURNAL = "journal.jsonl"


def view_path(view: str, name: str) -> str:
    """Path of a view's file inside the artifact, as the manifest lists it."""
    return f"{view}/{name}"


def format_version(*, has_folds: bool) -> int:
    """What an artifact states as its version."""
    return FOLDS_FORMAT_VERSION if has_folds else FORMAT_VERSION
