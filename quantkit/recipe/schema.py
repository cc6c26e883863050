"""Writes the published JSON Schema: ``python -m quantkit.recipe.schema FILE``."""

from __future__ import annotations

import sys
from pathlib import Path

from .load import render_json_schema

if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render_json_schema(), encoding="utf-8")
