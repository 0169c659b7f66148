"""Turns the environment variables of onnxruntime-training's ORTModule into a YAML file of this configuration."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ort_accel.config import ortmodule_rules as rules
from ort_accel.config.env_file import Variable
from ort_accel.config.ortmodule_rules import NoCounterpart, Outcome, Rule, Setting
from ort_accel.config.schema import Config
from ort_accel.config.yaml_writer import flow
from ort_accel.errors import ConfigError, Problem

PREFIX = "ORTMODULE_"
PLANS_VARIABLE = "ORTMODULE_MEMORY_OPT_CONFIG"

RULES: dict[str, Rule] = {
    "ONNX_OPSET_VERSION": rules.opset,
    "FALLBACK_POLICY": rules.fallback,
    "FALLBACK_RETRY": rules.fallback_retry,
    "CACHE_DIR": rules.path("engine.cache_dir"),
    "SAVE_ONNX_PATH": rules.path(
        "engine.save_onnx",
        note="Models are saved whenever this is set; upstream also needed DebugOptions(save_onnx=True).",
    ),
    "ENABLE_CUSTOM_AUTOGRAD": rules.switch("engine.custom_autograd"),
    "ALLOW_AUTOGRAD_CHECKPOINT": rules.checkpoint,
    "SKIPCHECK_POLICY": rules.skip_checks,
    "ENABLE_COMPUTE_OPTIMIZER": rules.compute_optimizer,
    "USE_FLASH_ATTENTION": rules.attention,
    "USE_EFFICIENT_ATTENTION": rules.attention,
    "ATEN_SDPA_FALLBACK": rules.any_attention,
    "CONV_ALGO_SEARCH": rules.choice("compute.conv_algorithm", "HEURISTIC", "EXHAUSTIVE"),
    "USE_TRITON": rules.triton,
    "TRITON_CONFIG_FILE": rules.triton_ops,
    "TRITON_DEBUG": rules.triton_debug,
    "ENABLE_TUNING": rules.switch("compute.tuning.enabled"),
    "MAX_TUNING_DURATION_MS": rules.tuning_duration,
    "TUNING_RESULTS_PATH": rules.tuning_results,
    "MEMORY_OPT_LEVEL": rules.memory_level,
    "MEMORY_OPT_CONFIG": rules.memory_plans,
    "ENABLE_MEM_EFFICIENT_GRAD_MGMT": rules.early_gradients,
    "ENABLE_LABEL_SPARSE_OPTIMIZER": rules.sparsity("density.labels"),
    "ENABLE_EMBEDDING_SPARSE_OPTIMIZER": rules.sparsity("density.padding"),
    "PRINT_INPUT_DENSITY": rules.switch("density.inspect"),
    "ENABLE_ZERO_STAGE3": rules.switch("distributed.zero3", on="auto"),
    "LOG_LEVEL": rules.choice("observe.log_level", "VERBOSE", "DEVINFO", "INFO", "WARNING", "ERROR", "FATAL"),
    "PRINT_MEMORY_STATS": rules.switch("observe.memory_stats"),
    "DEEPCOPY_BEFORE_MODEL_EXPORT": rules.no_counterpart("the model is compiled as it is, so it is never copied"),
    "JSON_CONFIG_PATH": rules.no_counterpart("that JSON format is not read; carry its entries over by hand"),
}
"""Every variable of ORTModule 1.19.2, without its prefix, in the order in which the keys are written."""


@dataclass(frozen=True)
class Migrated:
    """One of the outcomes of a variable, which may become several keys."""

    variable: Variable
    outcome: Outcome


def migrate(variables: Iterable[Variable]) -> list[Migrated]:
    """Returns the outcomes of the `ORTMODULE_*` variables, in the order of `RULES`; others are passed over.

    A `ConfigError` holds all values that no variable can have.
    """
    ours = {variable.name.removeprefix(PREFIX): variable for variable in variables if variable.name.startswith(PREFIX)}
    values = {name: variable.value for name, variable in ours.items()}
    migrated: list[Migrated] = []
    problems: list[Problem] = []
    for name in [*(name for name in RULES if name in ours), *sorted(ours.keys() - RULES.keys())]:
        rule = RULES.get(name) or _unknown(name)
        try:
            _require_text(values[name])
            migrated += [Migrated(ours[name], outcome) for outcome in rule(values[name], values)]
        except ValueError as error:
            problems.append(ours[name].problem(str(error)))
    if problems:
        raise ConfigError(problems)
    return migrated


def to_yaml(migrated: Sequence[Migrated]) -> str:
    """Returns a YAML file of the keys, each with its variable, and a comment for each variable without a key."""
    lines = ["# Written by `ort-accel migrate` from the variables of ORTModule. `ort-accel check` checks it."]
    if not migrated:
        lines.append(f"# No {PREFIX}* variable was set, so every key keeps its default.")
    lines += ["version: 1", *_setting_lines(migrated)]
    refusals = [(each.variable, each.outcome) for each in migrated if isinstance(each.outcome, NoCounterpart)]
    if refusals:
        lines += ["", "# Without a key:"]
    for variable, outcome in refusals:
        lines += _comment(f"{ascii(variable.name)[1:-1]}={ascii(variable.value)[1:-1]}: {outcome.reason}", hang=2)
    return "\n".join(lines) + "\n"


def _unknown(name: str) -> Rule:
    near = difflib.get_close_matches(name, RULES, n=1)
    suggestion = f"; did you mean {PREFIX}{near[0]}?" if near else ""
    return rules.no_counterpart(f"ORTModule 1.19.2 has no variable of this name{suggestion}")


def _require_text(value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{value!r} is not UTF-8") from error
    if "\0" in value:
        raise ValueError(f"{value!r} holds a NUL, which no variable can")


def _setting_lines(migrated: Iterable[Migrated]) -> Iterator[str]:
    """Yields the keys in their sections. Of a key that several variables decide, the rules give each the same value."""
    tree: dict[str, Any] = {}
    for each in migrated:
        if isinstance(each.outcome, Setting):
            *sections, name = each.outcome.key.split(".")
            branch = tree
            for section in sections:
                branch = branch.setdefault(section, {})
            branch.setdefault(name, []).append(each)
    yield from _branch_lines({section: tree[section] for section in Config.model_fields if section in tree})


def _branch_lines(branch: dict[str, Any], indent: str = "") -> Iterator[str]:
    for name, item in branch.items():
        if isinstance(item, dict):
            yield f"{indent}{name}:"
            yield from _branch_lines(item, indent + "  ")
        else:
            setting = item[0].outcome
            yield from _comment(setting.note, indent)
            yield f"{indent}{name}: {flow(setting.value)}  # {', '.join(each.variable.name for each in item)}"


def _comment(text: str, indent: str = "", *, hang: int = 0) -> list[str]:
    start = f"{indent}# "
    return textwrap.wrap(
        text,
        110,
        initial_indent=start,
        subsequent_indent=start + " " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
