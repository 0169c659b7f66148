"""Keys and values that are wrong: where it is said, and what is proposed."""

# ruff: noqa: E501 (messages are easier to read on one line)

from __future__ import annotations

import pytest

from ort_accel.config import Config, ConfigError, load_config

LOCATED = {
    "misspelt key": ("memory:\n  lvel: 1\n", "x.yaml:2:3: memory.lvel: unknown key; did you mean memory.level? allowed: level, plans,"),
    "key of another section": ("level: 1\n", "x.yaml:1:1: level: unknown key; did you mean memory.level? allowed: version, engine"),
    "key with another name": ("compute:\n  triton: {enabled: true}\n", "x.yaml:2:3: compute.triton: this key was removed: kernels are generated on the CPU, too; write generated in"),
    "removed key": ("engine:\n  skip_checks: true\n", "x.yaml:2:3: engine.skip_checks: this key was removed: with it, a model that changed"),
    "key with hyphens": ("engine:\n  cache-dir: x\n", "x.yaml:2:3: engine.cache-dir: unknown key; did you mean engine.cache_dir?"),
    "dotted key": ("memory.level: 1\n", "x.yaml:1:1: memory.level: unknown key; did you mean level: inside of memory:?"),
    "key in the third level": ("compute:\n  tuning: {enbled: true}\n", "x.yaml:2:12: compute.tuning.enbled: unknown key; did you mean compute.tuning.enabled?"),
    "yes": ("observe: {memory_stats: yes}\n", "x.yaml:1:25: observe.memory_stats: the text 'yes' is not allowed; did you mean true? allowed: true, false"),
    "Off": ("density: {labels: Off}\n", "x.yaml:1:19: density.labels: the text 'Off' is not allowed; did you mean false? allowed: auto, true, false"),
    "quoted boolean": ("density: {inspect: 'true'}\n", "x.yaml:1:20: density.inspect: the text 'true' is not allowed; did you mean true without quotes?"),
    "number for a boolean": ("density: {inspect: 1}\n", "x.yaml:1:20: density.inspect: 1 is not allowed; did you mean true?"),
    "near a choice": ("engine: {fallback: warning}\n", "x.yaml:1:20: engine.fallback: the text 'warning' is not allowed; did you mean warn? allowed: warn, report, error"),
    "quoted number": ("engine: {opset: '20'}\n", "x.yaml:1:17: engine.opset: the text '20' is not allowed; did you mean 20 without quotes? allowed: auto, a whole number from 17 to 25"),
    "text for a number of tokens": ("data: {packing: {max_length: long}}\n", "x.yaml:1:30: data.packing.max_length: the text 'long' is not allowed; allowed: a whole number"),
    "fraction": ("engine: {opset: 20.0}\n", "x.yaml:1:17: engine.opset: 20.0 is not allowed; did you mean 20?"),
    "out of range": ("engine: {threads: 2000}\n", "x.yaml:1:19: engine.threads: 2000 is out of range; allowed: auto, a whole number from 1 to 1024"),
    "boolean level": ("memory: {level: true}\n", "x.yaml:1:17: memory.level: true is not allowed; allowed: auto, 0, 1, 2"),
    "fractional level": ("memory: {level: 1.0}\n", "x.yaml:1:17: memory.level: 1.0 is not allowed; did you mean 1?"),
    "list for a section": ("memory: [level]\n", "x.yaml:1:9: memory: a list is not allowed; allowed: a map with the keys level"),
    "section without keys": ("memory:\ndensity: {labels: true}\n", "x.yaml:1:1: memory: null is not allowed; allowed: a map"),
    "map for a value": ("memory: {level: {a: 1}}\n", "x.yaml:1:17: memory.level: a map is not allowed"),
    "item of a list": ("engine:\n  run_in_pytorch:\n    - aten.gelu\n    - 3\n", "x.yaml:4:7: engine.run_in_pytorch[1]: 3 is not allowed; allowed: text such as aten.gelu"),
    "operator without its namespace": ("engine: {run_in_pytorch: [gelu]}\n", "x.yaml:1:27: engine.run_in_pytorch[0]: the text 'gelu' is not allowed; did you mean aten.gelu? allowed: text such as aten.gelu"),
    "operator that no namespace saves": ("engine: {run_in_pytorch: ['ge lu']}\n", "x.yaml:1:27: engine.run_in_pytorch[0]: the text 'ge lu' is not allowed; allowed: text such as aten.gelu"),
    "whole number that stays out of range as a fraction": ("optimizer: {fp16: {growth_factor: 1}}\n", "x.yaml:1:35: optimizer.fp16.growth_factor: 1 is out of range; allowed: a number above 1"),
    "quoted number out of range": ("engine: {opset: '99'}\n", "x.yaml:1:17: engine.opset: the text '99' is not allowed; allowed: auto, a whole number from 17 to 25"),
    "missing key": ("observe:\n  activation_statistics: {end_step: 1}\n", "x.yaml:2:3: observe.activation_statistics.output_dir: this key must be given; allowed: a path"),
    "no size": ("memory: {budget: 6 gigs}\n", "x.yaml:1:18: memory.budget: '6 gigs' is not a size: write a number and one of KiB"),
    "endless size": (f"memory: {{budget: {'1' * 9000}GiB}}\n", "x.yaml:1:18: memory.budget: '1111"),
    "share above one": ("memory: {budget: 1.5}\n", "x.yaml:1:18: memory.budget: 1.5 is not allowed; allowed: text such as 6GiB, a number above 0 up to 1, null"),
    "empty path": ("engine: {cache_dir: ''}\n", "x.yaml:1:21: engine.cache_dir: an empty path"),
    "option": ("engine: {provider: cpu, provider_options: {str: {str: 1}}}\n", "x.yaml:1:49: engine.provider_options.str: a map is not allowed"),
    "version to come": ("version: 2\n", "x.yaml:1:10: version: 2 is not allowed; allowed: 1"),
    "version as text": ("version: '1'\n", "x.yaml:1:10: version: the text '1' is not allowed; did you mean 1 without quotes? allowed: 1"),
    "version as boolean": ("version: true\n", "x.yaml:1:10: version: true is not allowed; allowed: 1"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "start"), LOCATED.values(), ids=LOCATED)
def test_one_mistake_gives_one_error_at_its_place(errors, text, start):
    found = errors(text)
    assert found[0].startswith(start), found
    assert len(found) == 1, found


FIVE = """\
version: 1
memory:
    lvel: 1
engine: {fallback: eror}
density:
    labels: yes
    threshold: 1.5
optimizer:
    name: adamw
"""


def test_five_mistakes_give_five_located_errors_in_the_order_of_the_file(errors):
    found = errors(FIVE)
    assert [line.split(" ")[0] for line in found] == [
        f"x.yaml:{place}:" for place in ("3:5", "4:20", "6:13", "7:16", "9:11")
    ]
    for line, meant in zip(found, ["memory.level", "error", "true", None, "adamw_ort_fused"], strict=True):
        assert meant is None or f"did you mean {meant}?" in line
        assert "allowed: " in line


def test_a_dict_gives_the_same_errors_without_places():
    with pytest.raises(ConfigError) as caught:
        load_config({"memory": {"lvel": 1, "level": True}})
    assert [(problem.path, problem.source, problem.line) for problem in caught.value.problems] == [
        ("memory.level", None, None),
        ("memory.lvel", None, None),
    ]


@pytest.mark.parametrize(
    "data", [{"a": object()}, {1: 2}, {"memory": {"level": {3}}}, {"engine": {"threads": 10**400}}]
)
def test_python_data_that_yaml_cannot_hold_is_an_error(data):
    with pytest.raises(ConfigError):
        load_config(data)


def test_a_dict_that_holds_itself_is_an_error():
    data: dict[str, object] = {}
    data["memory"] = data
    with pytest.raises(ConfigError, match="nested more than"):
        load_config(data)


@pytest.mark.parametrize("source", [3, ["a.yaml"], object()])
def test_a_source_of_another_type_is_an_error(source):
    with pytest.raises(ConfigError, match="a configuration is a path, a dict, a Config or None"):
        load_config(source)


def test_nothing_gives_the_defaults_and_a_config_comes_back():
    assert load_config() == load_config({}) == Config()
    config = Config()
    assert load_config(config) is config


def test_environment_variables_are_not_expanded(monkeypatch):
    monkeypatch.setenv("CACHE", "expanded")
    config = load_config({"engine": {"cache_dir": "${CACHE}/$CACHE"}})
    assert str(config.engine.cache_dir) == "${CACHE}/$CACHE"
