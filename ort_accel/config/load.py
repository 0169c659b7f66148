"""Builds a `Config` from a file, a text or a dict, and finds every problem at once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from ort_accel.config.declaration import Rule, broken
from ort_accel.config.extends import Chain, follow
from ort_accel.config.schema import Config
from ort_accel.config.tree import (
    KeyPath,
    Node,
    Position,
    UnsupportedDataError,
    from_data,
    position_of,
    shortened,
    value_at,
    without,
)
from ort_accel.config.wording import validate
from ort_accel.config.yaml_file import parse, read_file
from ort_accel.errors import ConfigError, Problem

SECTION = "ort_accel_config"
"""The key that holds a configuration, or names its file, inside a configuration file of accelerate."""

ConfigSource = str | os.PathLike[str] | Mapping[str, object] | Config | None


def load_config(source: ConfigSource = None) -> Config:
    """Returns the configuration in a YAML file or a dict; the defaults for None. A `Config` is checked and returned.

    Of a configuration file of accelerate the section `ort_accel_config` counts, a map or the path of another file.
    Raises `ConfigError` with all problems, each with its place in the file.
    """
    if source is None:
        return Config()
    if isinstance(source, Config):
        _raise_if([_rule_problem(None, rule, message) for rule, message in broken(source)])
        return source
    if isinstance(source, Mapping):
        return _load_data(source)
    if isinstance(source, str | os.PathLike):
        return _load_file(os.fspath(source))
    kind = type(source).__name__
    raise ConfigError([Problem("", f"a configuration is a path, a dict, a Config or None, not a value of type {kind}")])


def load_config_text(content: str | bytes, name: str = "<stdin>", folder: str | os.PathLike[str] = ".") -> Config:
    """Returns the configuration in YAML text. `folder` is where a relative `extends` begins."""
    tree, problems = parse(content, name)
    return _build(tree, problems, name, Path(folder))


def _load_file(name: str | bytes, with_section: bool = True) -> Config:
    name = os.fsdecode(name)
    file = Path(name)
    content, reason = read_file(file, name)
    if content is None:
        raise ConfigError([Problem("", reason, source=name)])
    tree, problems = parse(content, name)
    section = value_at(tree, (SECTION,)) if tree and with_section else None
    if section is not None:
        return _load_section(section, problems, name, file.parent)
    return _build(tree, problems, name, file.parent, file)


def _load_section(section: Node, problems: list[Problem], name: str, folder: Path) -> Config:
    """Returns the configuration in, or named by, the section of a configuration file of accelerate."""
    if isinstance(section.value, str):
        file = folder / section.value
        if not file.is_file():
            reason = read_file(file, str(file))[1] or "this is not a file"
            raise ConfigError([section.position.problem((SECTION,), f"{shortened(section.value)!r}: {reason}")])
        return _load_file(str(file), with_section=False)
    if section.value is not None and not isinstance(section.value, dict):
        text = "a map of ort_accel's keys belongs here, or the path of its file, relative to this one"
        raise ConfigError([section.position.problem((SECTION,), text)])
    mine = [problem for problem in problems if problem.path == SECTION or _within(problem.path, SECTION)]
    inside = [replace(problem, path=problem.path.removeprefix(SECTION).removeprefix(".")) for problem in mine]
    try:
        return _build(Node(section.value or {}, section.position), inside, name, folder)
    except ConfigError as error:
        raise ConfigError(_below_section(problem, name) for problem in error.problems) from None


def _below_section(problem: Problem, name: str) -> Problem:
    path = f"{SECTION}.{problem.path}" if problem.path else SECTION
    return replace(problem, path=path) if problem.source == name else problem


def _load_data(data: Mapping[str, object]) -> Config:
    try:
        tree = from_data(data)
    except UnsupportedDataError as error:
        raise ConfigError([Position().problem(error.path, error.message)]) from error
    return _build(tree, [], "config", Path())


def _build(tree: Node | None, problems: list[Problem], name: str, folder: Path, file: Path | None = None) -> Config:
    """Returns the configuration that a tree stands for, with what it extends."""
    if tree is None:
        raise ConfigError(problems)
    chain = follow(tree, name, folder, file)
    problems = [*problems, *chain.problems]
    for each in chain.trees:
        problems += _new(problems, [problem for _, problem, missing in validate(each)[1] if not missing])
    merged = chain.merged()
    config, mistakes = validate(merged)
    if chain.complete:
        problems += _new(problems, [problem for _, problem, _ in mistakes])
        problems += _broken_rules(config or _valid_part(merged, mistakes), merged, problems)
    _raise_if(_in_order(problems, chain))
    assert config is not None, "a configuration is either valid or has problems"
    return config


def _new(known: Iterable[Problem], found: list[Problem]) -> list[Problem]:
    """Returns the problems at places where no problem was known."""
    places = {(problem.source, problem.line, problem.column) for problem in known if problem.line is not None}
    texts = {(problem.path, problem.message) for problem in known if problem.line is None}
    return [
        problem
        for problem in found
        if (problem.source, problem.line, problem.column) not in places and (problem.path, problem.message) not in texts
    ]


def _valid_part(tree: Node, mistakes: list[tuple[KeyPath, Problem, bool]]) -> Config:
    """Returns the configuration without the keys that have a mistake, so that the rules can look at the others."""
    config: Config | None = None
    while config is None:
        for path, _, missing in mistakes:
            tree = without(tree, path[:-1] if missing else path)
        config, mistakes = validate(tree)
    return config


def _broken_rules(config: Config, tree: Node, problems: list[Problem]) -> list[Problem]:
    """Returns the rules that are broken, of those whose keys have no problem of their own."""
    wrong = {problem.path.partition("[")[0] for problem in problems}
    return [
        _rule_problem(tree, rule, message)
        for rule, message in broken(config)
        if not any(_within(key, path) or _within(path, key) for key in rule.keys for path in wrong)
    ]


def _within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _rule_problem(tree: Node | None, rule: Rule, message: str) -> Problem:
    """Returns the problem at the first key of a rule that the file gives."""
    paths: list[KeyPath] = [tuple(key.split(".")) for key in rule.keys]
    if tree is None:
        return Position().problem(paths[0], message)
    given = next((path for path in paths if value_at(tree, path) is not None), ())
    return position_of(tree, given).problem(paths[0], message)


def _in_order(problems: list[Problem], chain: Chain) -> list[Problem]:
    """Sort problems in the order of the files that extend each other, and of the lines in each."""
    files = list(
        dict.fromkeys([tree.position.source for tree in chain.trees] + [problem.source for problem in problems])
    )
    return sorted(problems, key=lambda each: (files.index(each.source), each.line or 0, each.column or 0))


def _raise_if(problems: list[Problem]) -> None:
    if problems:
        raise ConfigError(problems)
