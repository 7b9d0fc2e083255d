"""Parse tool calls and reasoning in a model's text: `read` a whole answer, or feed a `Reader` as it arrives."""

from .calls import Reading, TextPart
from .reader import Reader, read

__all__ = ["Reader", "Reading", "TextPart", "read"]
