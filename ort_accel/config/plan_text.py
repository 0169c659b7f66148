"""Recomputation plans as text: `cluster:type:count`, alone, joined by commas, or as a JSON list in a file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ort_accel.config.tree import shortened
from ort_accel.reporting.memory import PlanKind

GRAMMAR = "a plan is cluster:type:count, such as BiasGelu+:1:-1"
MAX_BYTES = 1 << 20

_CLUSTER = re.compile(r"(?:[A-Za-z_]\w*\+)+", re.ASCII)
_COUNT = re.compile(r"-1|[1-9][0-9]{0,8}")


class PlanError(ValueError):
    """An unusable plan or file of plans. The text names the value seen and the allowed ones."""


@dataclass(frozen=True)
class Plan:
    """A cluster of operators, and the treatment of the places in the graph where it is found."""

    cluster: str
    """ONNX operators in topological order, each followed by `+`."""
    kind: PlanKind
    count: int
    """The number of places, counted from the first one; -1 takes all."""

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Returns the plan that a text stands for."""
        fields = text.strip().split(":")
        if len(fields) != 3:
            raise PlanError(f"{shortened(text)!r} is not three fields with : between them; {GRAMMAR}")
        cluster, kind, count = fields
        if not _CLUSTER.fullmatch(cluster):
            raise PlanError(
                f"{shortened(cluster)!r} is no cluster; write ONNX operators, each followed by +; {GRAMMAR}"
            )
        if kind not in ("0", "1", "2"):
            raise PlanError(
                f"{shortened(kind)!r} is no type; write 0 (off), 1 (recompute) or 2 (keep a smaller copy); {GRAMMAR}"
            )
        if not _COUNT.fullmatch(count):
            raise PlanError(f"{shortened(count)!r} is no count; write -1 (all) or how many, from 1 on; {GRAMMAR}")
        return cls(cluster, PlanKind(int(kind)), int(count))

    def __str__(self) -> str:
        return f"{self.cluster}:{self.kind}:{self.count}"


def parse_plans(text: str) -> tuple[Plan, ...]:
    """Returns the plans of a text that may hold several, joined by commas."""
    return tuple(Plan.parse(part) for part in text.split(","))


def join_plans(texts: Iterable[str]) -> tuple[Plan, ...]:
    """Returns the plans of several texts, each once; two that say different things of one cluster are an error."""
    plans: dict[str, Plan] = {}
    for plan in (plan for text in texts for plan in parse_plans(text)):
        if plans.setdefault(plan.cluster, plan) != plan:
            first, second = shortened(str(plans[plan.cluster])), shortened(str(plan))
            raise PlanError(f"{first} and {second} say different things of one cluster; keep one of them")
    return tuple(plans.values())


def read_plan_file(file: Path) -> tuple[Plan, ...]:
    """Returns the plans of a JSON file that holds a list of texts."""
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise PlanError(f"{file} is larger than {MAX_BYTES >> 20} MiB; a JSON list of plans is expected")
        texts = json.loads(content)  # which guesses the encoding
    except PlanError:
        raise
    except OSError as error:
        raise PlanError(f"{file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{file} is no text; a JSON list of plans is expected") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{file} is not JSON: {error}") from error
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise PlanError(f'{file} does not hold a JSON list of texts, such as ["BiasGelu+:1:-1"]')
    try:
        return join_plans(texts)
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from error
