"""The asserts of a model on numbers in tensors, such as as many image tokens as image features."""

from __future__ import annotations

ASSERT_FAILED = "what the model checks does not hold"
"""The message of a failed assert. Eager mode repeats it in the model's own words."""


class CheckFailed(RuntimeError):
    """A number is not what the model asks for."""


def raise_unless(holds: object, text: str) -> None:
    """Raise an error unless it holds."""
    if not holds:
        raise CheckFailed(text)


def is_failed_check(error: Exception) -> bool:
    """True if an assert failed, in a compiled graph or in one that runs as it was captured."""
    return isinstance(error, CheckFailed) or (isinstance(error, RuntimeError) and ASSERT_FAILED in str(error))
