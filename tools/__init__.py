"""Scripts that made what is bundled; not part of the wheel."""
