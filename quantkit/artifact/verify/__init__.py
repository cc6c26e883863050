"""Verification of an artifact: ``run`` calls the sections, each in a file of its own; ``findings`` collects."""

from .findings import Check, VerifyReport
from .run import verify_artifact

__all__ = ["Check", "VerifyReport", "verify_artifact"]
