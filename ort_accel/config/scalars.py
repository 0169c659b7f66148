"""Reads unquoted YAML 1.2 scalars, and writes values so that they are read as the same."""

from __future__ import annotations

import re

from ort_accel.config.tree import MAX_INTEGER, Scalar, shortened

NULLS = ("", "~", "null", "Null", "NULL")
BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
YAML_1_1_BOOLS = {"yes": True, "on": True, "y": True, "no": False, "off": False, "n": False}
"""Words that YAML 1.1 took for booleans; here they are text, and an error points it out."""

_INTEGER = re.compile(r"[-+]?[0-9]+")
_BASED = {"0o": (re.compile(r"0o[0-7]+"), 8), "0x": (re.compile(r"0x[0-9a-fA-F]+"), 16)}
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")
_MAX_DIGITS = 20

_PLAIN = re.compile(r"[A-Za-z_./][\w./+-]*", re.ASCII)
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


class ScalarError(ValueError):
    """A scalar that YAML readers disagree on, or that is too large."""


def read_scalar(text: str) -> Scalar:
    """Returns the value of an unquoted scalar in the YAML 1.2 core schema."""
    if text in NULLS:
        return None
    if text in BOOLS:
        return BOOLS[text]
    if _LEADING_ZERO.fullmatch(text):
        raise ScalarError(
            f"{shortened(text)} is octal to some readers; write the number without leading zeros, or quote the text"
        )
    pattern, base = _BASED.get(text[:2], (_INTEGER, 10))
    if pattern.fullmatch(text):
        number = int(text, base) if len(text) <= _MAX_DIGITS else None
        if number is None or abs(number) > MAX_INTEGER:
            raise ScalarError(f"the number is too large; the largest is {MAX_INTEGER}")
        return number
    if _FLOAT.fullmatch(text):
        return float(text)
    if _INFINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def write_scalar(value: Scalar) -> str:
    """Returns the YAML for a value, quoted where it would otherwise be read as something else."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return repr(value).replace("inf", ".inf").replace("nan", ".nan")
    safe = _PLAIN.fullmatch(value) and value.lower() not in YAML_1_1_BOOLS and isinstance(_read_or_none(value), str)
    return value if safe else f'"{"".join(map(_escape, value))}"'


def _read_or_none(text: str) -> object:
    try:
        return read_scalar(text)
    except ScalarError:
        return None


def _escape(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character.isprintable() and character != "\ufeff":
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
