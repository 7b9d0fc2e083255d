"""Tool calls and thoughts, read out of a model's text. One small file a family; `families.py` has the table."""

from .reader import Reader, read
from .shapes import Piece, Reading

__all__ = ["Piece", "Reader", "Reading", "read"]
