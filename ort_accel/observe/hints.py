"""Hints: changes that may help, found in a report, each with the YAML to write. A hint is a function and a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from statistics import fmean

from ort_accel.observe.memory_plots import Data
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.report import State
from ort_accel.reporting.timings import EAGER

LONG_SET_UP_SECONDS = 3.0
MANY_COMPILATIONS = 4
"""Compilations beyond those of a forward and a backward for a first and a second shape."""
DENSE_SHARE = 0.9
"""The share of tokens that count below which padding is worth a hint."""
WAITING_SHARE = 0.05
LARGE_STASH_BYTES = 64 * 2**20
_CANNOT = (Reason.UNSUPPORTED_OP, Reason.UNSUPPORTED_DTYPE, Reason.DATA_DEPENDENT, Reason.MUTATION, Reason.FAILED)


@dataclass(frozen=True)
class Hint:
    """A change that may help."""

    text: str
    yaml: str = ""
    """The key with its value, in one line of YAML; empty where no key helps."""


def hints(data: Data) -> list[Hint]:
    """Returns the hints of a report, the most useful first."""
    return [hint for rule in RULES for hint in rule(data)]


def _eager_is_faster(data: Data) -> Iterator[Hint]:
    found = data["comparison"]
    if found and found["runner"] == EAGER:
        text = (
            "Eager PyTorch runs the steps, since those of ort_accel took longer. Tuning times operators at their sizes."
        )
        yield Hint(text, "compute.tuning.enabled: true")


def _refused(data: Data) -> Iterator[Hint]:
    for item in data["features"]:
        if item["state"] == State.REFUSED.value:
            yield Hint(f"Not in effect: {item['name']} ({item['reason']}).")


def _graph_breaks(data: Data) -> Iterator[Hint]:
    breaks = [item for item in data["fallbacks"] if item["reason"] == Reason.GRAPH_BREAK.value]
    if breaks:
        first = breaks[0]
        where = f" at {first['where']}" if first["where"] else ""
        count = sum(item["count"] for item in breaks)
        text = f"Python code divides the model's graph{where} ({first['detail'] or first['op']}; {count} in all)."
        yield Hint(f"{text} Change that line. The error has the complete list.", "engine.fallback: error")


def _cannot_run(data: Data) -> Iterator[Hint]:
    forced = [item for item in data["fallbacks"] if item["reason"] in _CANNOT and not item["is_called"]]
    if forced:
        count, most = sum(item["count"] for item in forced), forced[0]["op"]
        nodes = f"{count} nodes, most often {most}" if count > 1 else most
        yield Hint(f"ONNX Runtime cannot run {nodes}. The error has the complete list.", "engine.fallback: error")


def _recompiles(data: Data) -> Iterator[Hint]:
    count = data["counters"].get("compilations", 0)
    if count > MANY_COMPILATIONS and _key(data, "engine.dynamic_shapes") is not True:
        yield Hint(
            f"{count} graphs were compiled. Sizes that change can be dynamic at once.", "engine.dynamic_shapes: true"
        )


def _set_up(data: Data) -> Iterator[Hint]:
    seconds = sum(data["timings"].values())
    if seconds > LONG_SET_UP_SECONDS and _key(data, "engine.cache_dir") is None:
        text = f"The set-up took {seconds:.0f} s. A folder keeps compiled graphs for the next start."
        yield Hint(text, "engine.cache_dir: out/ort_accel_cache")


def _padding(data: Data) -> Iterator[Hint]:
    points = data["series"].get("ort/density", [])
    share = fmean(point["mean"] for point in points) if points else 1.0
    if share >= DENSE_SHARE:
        return
    feature = next((item for item in data["features"] if item["name"] == "density.padding"), None)
    if feature is not None and feature["state"] == State.OFF.value:
        text = f"{1 - share:.0%} of the tokens are padding, and they are computed ({feature['reason']})."
        yield Hint(f"{text} The error names the reader.", "density.padding: true")
    if not data["inspection"]:
        text = f"{1 - share:.0%} of the tokens are padding. The density table tells what other batches would compute."
        yield Hint(text, "density.inspect: true")


def _waiting(data: Data) -> Iterator[Hint]:
    found = data["inspection"]
    if found and found["waiting"] and not data["load_balance"]:
        without, with_it = found["waiting"]
        if found["processes"] > 1 and without - with_it > WAITING_SHARE:
            text = f"Processes wait {without:.0%} of the time for the one with the most tokens"
            yield Hint(f"{text}, {with_it:.0%} when balanced.", "distributed.load_balancing.enabled: true")


def _memory(data: Data) -> Iterator[Hint]:
    stash = max((item["stash"] for item in data["memory"]), default=0)
    if stash > LARGE_STASH_BYTES and _key(data, "memory.budget") is None and _key(data, "memory.level") == "auto":
        text = f"The forward keeps {stash / 2**20:,.0f} MiB for the backward."
        yield Hint(f"{text} Recomputation of layers leaves less, and takes time.", "memory.level: 1")


def _key(data: Data, path: str) -> object:
    """Returns the value of a key of the configuration; None if it is not recorded."""
    return reduce(
        lambda tree, name: tree.get(name) if isinstance(tree, Mapping) else None, path.split("."), data["config"]
    )


RULES: Sequence[Callable[[Data], Iterator[Hint]]] = (
    _eager_is_faster,
    _refused,
    _graph_breaks,
    _cannot_run,
    _recompiles,
    _set_up,
    _padding,
    _waiting,
    _memory,
)
"""The rules in their order."""
