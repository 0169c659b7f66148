"""Whatever happens to a file, the answer is a valid configuration or errors with places, never another exception."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from ort_accel.config import Config, ConfigError, Problem
from ort_accel.config.load import load_config_text

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
TEXTS = [file.read_text() for file in CONFIGS]
FRAGMENTS = [
    "yes",
    "null",
    "[]",
    "{}",
    "1",
    "-1",
    "1e999",
    "017",
    "&a",
    "*a",
    "!t x",
    "<<: *a",
    "? ",
    "- ",
    "\t",
    ": ",
    "'",
    '"',
    "|",
    "|2-",
    "\n---\n",
    "%YAML 1.1\n---\n",
    "...",
    "{a: &a [*a]}",
    "\ud800",
    "\0",
    "\r",
    "\x85",
    "\u2028",
    "\ufeff",
    "9" * 5000,
    "extends: x",
    "#",
]


def answer(content: str | bytes) -> None:
    lines = re.split(rb"\r\n|\r|\n", content) if isinstance(content, bytes) else re.split(r"\r\n|\r|\n", content)
    for problem in problems_of(content):
        assert problem.source == "x.yaml"
        assert problem.line is not None
        assert problem.column is not None
        assert 1 <= problem.line <= len(lines), problem
        assert problem.column >= 1
        assert "\n" not in str(problem)


def problems_of(content: str | bytes) -> tuple[Problem, ...]:
    try:
        assert isinstance(load_config_text(content, "x.yaml", folder="/nonexistent"), Config)
    except ConfigError as error:
        return error.problems or (Problem("", "an error without a problem"),)
    return ()


@st.composite
def mutated(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(TEXTS))
    if draw(st.booleans()):
        text = re.sub(r"(?m)^\s*(#.*)?\n", "", text)
    for _ in range(draw(st.integers(1, 4))):
        lines = text.splitlines(keepends=True) or [""]
        number = draw(st.integers(0, len(lines) - 1))
        text = "".join(_changed(draw, lines, number))
    return text


def _changed(draw: st.DrawFn, lines: list[str], number: int) -> list[str]:
    line = lines[number]
    word = draw(st.sampled_from(FRAGMENTS) | st.text(max_size=8))
    match draw(st.sampled_from(["delete", "twice", "rename", "retype", "truncate", "insert", "move", "indent"])):
        case "delete":
            return lines[:number] + lines[number + 1 :]
        case "twice":
            return lines[: number + 1] + lines[number:]
        case "rename":
            return [*lines[:number], re.sub(r"\w+:", f"{word}:".replace("\\", ""), line, count=1), *lines[number + 1 :]]
        case "retype":
            return [*lines[:number], re.sub(r":.*", lambda _: f": {word}", line), *lines[number + 1 :]]
        case "truncate":
            return [*lines[:number], line[: draw(st.integers(0, len(line)))]]
        case "insert":
            at = draw(st.integers(0, len(line)))
            return [*lines[:number], line[:at] + word + line[at:], *lines[number + 1 :]]
        case "move":
            return [*lines[number:], *lines[:number]]
    return [*lines[:number], draw(st.sampled_from([" ", "  ", "\t"])) + line, *lines[number + 1 :]]


@given(mutated())
def test_a_changed_config_file(text):
    answer(text)


@given(st.sampled_from(TEXTS), st.binary(min_size=1, max_size=4), st.data())
def test_a_config_file_with_other_bytes_in_it(text, noise, data):
    content = text.encode()
    at = data.draw(st.integers(0, len(content)))
    answer(content[:at] + noise + content[at + data.draw(st.integers(0, 4)) :])


@given(st.binary(max_size=300))
@example(b"\xef\xbb\xbf")
def test_any_bytes(content):
    answer(content)


@given(
    st.text(max_size=200)
    | st.lists(st.sampled_from([*FRAGMENTS, "a", "memory", "\n", " ", ":", "[", "]", "{", "}", ","])).map("".join)
)
def test_any_text(text):
    answer(text)
