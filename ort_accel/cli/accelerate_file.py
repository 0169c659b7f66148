"""A configuration file of accelerate that may have a section of ort_accel, checked with the places of both."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from accelerate.commands.config.config_args import ClusterConfig

from ort_accel.config import load_config
from ort_accel.config.load import SECTION
from ort_accel.config.tree import KeyPath, Node, Position, position_of
from ort_accel.config.yaml_file import parse, read_file
from ort_accel.errors import ConfigError, Problem

OLD_KEYS = ("fp16", "dynamo_backend")
"""Keys that accelerate still reads from files of older versions."""

SUPPORTED = {
    "compute_environment": ("LOCAL_MACHINE",),
    "distributed_type": ("NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED", "FSDP"),
}
"""The set-ups of accelerate in which ONNX Runtime can train."""


class AccelerateFile:
    """A configuration file for `ort-accel launch`. Mistakes, and set-ups that ort_accel lacks, are a `ConfigError`."""

    def __init__(self, name: str) -> None:
        self.name = name
        content, reason = read_file(Path(name), name)
        if content is None:
            raise ConfigError([Problem("", reason, source=name)])
        self._data, self._tree = _read(content, name)
        problems = self._unsupported() or self._unknown_keys()
        try:
            load_config(name if self.has_section else None)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(sorted(problems, key=lambda each: (each.source != name, each.line or 0)))

    @property
    def has_section(self) -> bool:
        """True if the file sets up ort_accel."""
        return SECTION in self._data

    @property
    def is_multi_cpu(self) -> bool:
        """True if several processes are to train on CPUs, without MPI."""
        return self._data.get("distributed_type") == "MULTI_CPU" and not self._data.get("mpirun_config")

    @property
    def processes(self) -> int:
        """Returns how many processes are to train."""
        return int(self._data.get("num_processes") or 1)

    def without_section(self, folder: Path) -> str:
        """Write accelerate's own keys into a folder, since accelerate refuses keys that it does not know."""
        file = folder / "accelerate.yaml"
        file.write_text(yaml.safe_dump({key: value for key, value in self._data.items() if key != SECTION}))
        return str(file)

    def _unsupported(self) -> list[Problem]:
        """Returns the set-ups that accelerate can launch and ort_accel cannot."""
        problems = [
            self._position((key,)).problem((key,), _unsupported_value(value, allowed))
            for key, allowed in SUPPORTED.items()
            if (value := self._data.get(key, allowed[0])) not in allowed
        ]
        for path in (("dynamo_backend",), ("dynamo_config", "dynamo_backend")):
            compiler = _below(self._data, path)
            if compiler is not None and str(compiler).upper() not in ("NO", "FALSE"):
                text = f"{compiler}: a model has one compiler, with `ort-accel launch` it is ort_accel; remove this key"
                problems.append(self._position(path).problem(path, text))
        return problems

    def _unknown_keys(self) -> list[Problem]:
        known = [*ClusterConfig.__dataclass_fields__, *OLD_KEYS]
        return [
            self._position((key,), key=True).problem((key,), _unknown(key, known))
            for key in map(str, self._data)
            if key not in known and key != SECTION
        ]

    def _position(self, path: KeyPath, key: bool = False) -> Position:
        return position_of(self._tree, path, key=key) if self._tree else Position(self.name)


def _read(content: bytes, name: str) -> tuple[dict[str, Any], Node | None]:
    """Returns the data that accelerate reads in the file, and the tree that knows the places."""
    tree, problems = parse(content, name)
    try:
        data = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ConfigError(problems or [Problem("", f"not readable as YAML: {error}", source=name)]) from error
    if not isinstance(data, dict):
        raise ConfigError(problems or [Problem("", "keys and values belong here; `ort-accel init` writes some", name)])
    return data, tree


def _unsupported_value(value: object, allowed: tuple[str, ...]) -> str:
    if value is False and "NO" in allowed:
        return "accelerate reads NO without quotes as false; write 'NO'"
    return f"{value}: no ONNX Runtime trains there; allowed: {', '.join(allowed)}"


def _unknown(key: str, known: list[str]) -> str:
    close = get_close_matches(key, [SECTION, *known], n=1)
    meant = f"; did you mean {close[0]}?" if close else ";"
    return f"unknown key{meant} allowed: {SECTION}, and of accelerate {', '.join(known)}"


def _below(data: Mapping[str, object], path: tuple[str, ...]) -> object:
    value: object = data
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value
