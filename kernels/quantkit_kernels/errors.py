"""What a conversion refuses to hide: broken numbers in a weight, and where the first of them stands.

This package imports nothing of quantkit, so these are plain ``ValueError`` classes; callers that know the name
of the tensor turn them into their own error tree.
"""

from __future__ import annotations


class BadValueError(ValueError):
    """A number that no conversion may pass on.

    Attributes:
        row, column: position of the first one in row-major order, in the whole weight (``row_offset`` included).
    """

    what = "bad value"

    def __init__(self, row: int, column: int) -> None:
        super().__init__(f"{self.what} at row {row}, column {column}")
        self.row, self.column = row, column

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.row, self.column)


class NanCodeError(BadValueError):
    """An FP8 e4m3 weight holds code 0x7F or 0xFF (NaN), which a trained weight never does."""

    what = "NaN code (0x7F or 0xFF) in the FP8 weight"


class NonFiniteError(BadValueError):
    """A weight is NaN or infinite, or the product of FP8 code and scale is."""

    what = "weight is NaN or infinite"
