"""Text that is not YAML, or that is YAML of a kind that a configuration does not need."""

from __future__ import annotations

import pytest

from ort_accel.config import ConfigError, load_config
from ort_accel.config.load import load_config_text

LOCATED = {
    "tab as indentation": ("memory:\n\tlevel: 1\n", "x.yaml:2:1: a tab stands here"),
    "no closing bracket": ("memory: {level: 1\n", "x.yaml:2:1: not readable as YAML"),
    "wrong indentation": ("memory:\n  level: 1\n plans: []\n", "x.yaml:3:2: this fits no section above"),
    "two colons": ("engine: {}\nmemory: level: 1\n", "x.yaml:2:14: no `:` can stand here"),
    "key without a colon": ("version: 1\nmemory\n", "x.yaml:3:1: a key without its `:` ends here"),
    "duplicate key": (
        "memory:\n  level: 1\n  level: 2\n",
        "x.yaml:3:3: memory.level: given twice; the first is on line 2",
    ),
    "unknown alias": ("memory: *nowhere\n", "x.yaml:1:9: memory: *nowhere has no anchor"),
    "alias inside of itself": ("memory: &a {level: *a}\n", "x.yaml:1:20: memory.level: *a is used inside of itself"),
    "custom tag": ("memory: !python/object {}\n", "x.yaml:1:9: memory: the tag !python/object is not understood"),
    "two documents": ("version: 1\n---\nversion: 1\n", "x.yaml:2:1: a second document begins here"),
    "YAML 1.1 directive": ("# old\n%YAML 1.1\n---\nversion: 1\n", "x.yaml:2:1: directives change the meaning"),
    "tag directive": ("%TAG ! tag:a,2000:\n---\nversion: 1\n", "x.yaml:1:1: directives change the meaning"),
    "merge key": ("memory:\n  <<: {level: 1}\n", "x.yaml:2:3: memory: merge keys are not understood"),
    "key that is a number": ("memory:\n  1: 2\n", "x.yaml:2:3: memory: a key must be text"),
    "key that is a list": ("? [a]\n: 1\n", "x.yaml:1:3: a key must be text"),
    "octal of old": ("engine: {threads: 017}\n", "x.yaml:1:19: engine.threads: 017 is octal to some readers"),
    "sexagesimal of old": ("engine: {threads: 1:30}\n", "x.yaml:1:19: engine.threads: the text '1:30' is not allowed"),
    "timestamp": ("engine: {threads: 2001-01-01}\n", "x.yaml:1:19: engine.threads: the text '2001-01-01' is not"),
    "endless number": (f"engine: {{threads: {'9' * 5000}}}\n", "x.yaml:1:19: engine.threads: the number is too large"),
    "infinite number": ("density: {threshold: .inf}\n", "x.yaml:1:22: density.threshold: .inf is"),
    "NUL": ("version: 1\n# \0\n", "x.yaml:2:3: control character U+0000"),
    "escape code": ("version: \x1b[1m1\n", "x.yaml:1:10: control character U+001B"),
    "half a character": ('engine: {cache_dir: "\\ud800"}\n', "x.yaml:1:21: engine.cache_dir: the text holds half"),
    "byte that is not UTF-8": (b"version: 1\nengine: \xff\n", "x.yaml:2:9: byte 0xff is not UTF-8"),
    "UTF-16": ("version: 1".encode("utf-16"), "x.yaml:1:1: byte 0xff is not UTF-8"),
    "empty": ("", "x.yaml:1:1: the file is empty; the smallest one is `version: 1`"),
    "comments only": ("# nothing\n", "x.yaml:1:1: the file is empty"),
    "empty document": ("---\n...\n", "x.yaml:1:1: the file is empty"),
    "list at the top": ("\n- version: 1\n", "x.yaml:2:1: keys and values belong here"),
    "text at the top": ("version 1\n", "x.yaml:1:1: keys and values belong here"),
    "nested too deep": (f"memory: {'[' * 5000}", "x.yaml:1:40: memory[0][0]: nested more than 32 deep"),
    "too large": ("#" * 300_000, "x.yaml:1:1: larger than 256 KiB"),
}


@pytest.mark.parametrize(("text", "start"), LOCATED.values(), ids=LOCATED)
def test_is_refused_at_its_place(errors, text, start):
    found = errors(text)
    assert found[0].startswith(start), found
    assert len(found) == 1, found


def test_aliases_that_blow_up_are_refused_before_they_are_written_out(errors):
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    found = errors("\n".join(["a0: &a0 [x, x]", *levels]))
    assert "more than 10000 values, with every alias written out" in found[-1]


def test_aliases_cannot_nest_deeper_than_what_is_written_out(errors):
    levels = [f"a{n}: &a{n} [[[[*a{n - 1}]]]]" for n in range(1, 30)]
    assert "nested more than 32 deep" in errors("\n".join(["a0: &a0 x", *levels]))[-1]


def test_what_a_terminal_would_obey_is_shown_escaped(errors):
    assert errors('"a\\e[1m\\n": 1\n')[0].startswith("x.yaml:1:1: a\\x1b[1m\\n: unknown key")


def test_a_plain_alias_is_fine():
    config = load_config_text("observe: {memory_stats: &on true}\nmemory: {offload: false}\ndensity: {inspect: *on}\n")
    assert config.density.inspect


def test_a_byte_order_mark_and_windows_line_ends_are_fine():
    assert load_config_text(b"\xef\xbb\xbfversion: 1\r\nmemory:\r\n  level: 1\r\n").memory.level == 1


def test_a_missing_file_is_named_with_a_similar_one(tmp_path):
    (tmp_path / "train.yaml").write_text("version: 1")
    with pytest.raises(ConfigError, match=r"trian\.yaml: no such file; did you mean .*/train\.yaml\?"):
        load_config(tmp_path / "trian.yaml")


@pytest.mark.parametrize(
    ("name", "reason"), [(".", "this is a folder"), ("a/b.yaml", "no such file"), ("\0", "cannot be")]
)
def test_what_is_not_a_file_is_an_error(tmp_path, name, reason):
    with pytest.raises(ConfigError, match=reason):
        load_config(tmp_path / name)
