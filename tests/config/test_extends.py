"""One file that builds on another."""

from __future__ import annotations

import pytest

from ort_accel.config import ConfigError, load_config
from ort_accel.config.load import load_config_text


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def files(**texts: str) -> None:
        for name, text in texts.items():
            file = tmp_path / f"{name.replace('__', '/')}.yaml"
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)

    return files


def problems(source) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    return str(caught.value).splitlines()


def test_sections_are_joined_and_lists_replaced(write):
    write(
        a="extends: b.yaml\nengine: {threads: 2, run_in_pytorch: [aten.topk]}\n",
        b="engine: {threads: 1, opset: 20, run_in_pytorch: [aten.gelu]}\n",
    )
    engine = load_config("a.yaml").engine
    assert (engine.threads, engine.opset, engine.run_in_pytorch) == (2, 20, ("aten.topk",))


def test_names_are_relative_to_the_file_that_holds_them(write):
    write(a="extends: sub/b.yaml\n", sub__b="extends: c.yaml\n", sub__c="memory: {level: 1}\n")
    assert load_config("a.yaml").memory.level == 1
    assert load_config({"extends": "sub/b.yaml"}).memory.level == 1
    assert load_config_text("extends: c.yaml", folder="sub").memory.level == 1


def test_a_circle_is_refused_with_its_chain(write):
    write(a="version: 1\nextends: b.yaml\n", b="extends: a.yaml\n")
    (found,) = problems("a.yaml")
    assert found.startswith(
        "b.yaml:1:10: extends: the files extend each other in a circle: a.yaml -> b.yaml -> a.yaml;"
    )


def test_a_missing_file_is_located_where_it_is_named(write):
    write(a="version: 1\nextends: nowhere.yaml\nmemory: {lvel: 1}\n")
    found = problems("a.yaml")
    assert found[0].startswith("a.yaml:2:10: extends: 'nowhere.yaml': no such file")
    assert "did you mean" not in found[0]  # the only file there is the one that was read
    assert found[1].startswith("a.yaml:3:10: memory.lvel: unknown key")


def test_mistakes_are_located_in_the_file_that_has_them(write):
    write(
        a="extends: b.yaml\nversion: 1\nmemory: {level: 1}\n", b="version: 2\nmemory:\n  lvel: 1\n  plans: ['A+:1:1']\n"
    )
    assert [line.split(" ")[0] for line in problems("a.yaml")] == ["b.yaml:1:10:", "b.yaml:3:3:", "b.yaml:4:10:"]


def test_a_key_that_must_be_given_may_be_in_either_file(write):
    write(
        a="extends: b.yaml\nobserve: {activation_statistics: {end_step: 3}}\n",
        b="observe: {activation_statistics: {output_dir: x}}\n",
    )
    assert load_config("a.yaml").observe.activation_statistics.end_step == 3


@pytest.mark.parametrize("link", ["3", "[b.yaml]", "''", "null", '"a\\0b"'])
def test_only_one_name_is_allowed(write, link):
    write(a=f"extends: {link}\n")
    assert problems("a.yaml")[0].startswith("a.yaml:1:10: extends: this must be the path of one YAML file")
