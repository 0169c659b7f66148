"""The result of a benchmark as people read it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ort_accel.cli.benchmark.run import Result


def render(result: Result) -> RenderableType:
    """Returns the figures, the facts that they rest on, and the faults."""
    parts: list[RenderableType] = [Text(str(result.workload), style="bold"), Text(), _figures(result), Text()]
    for name, fault in result.wrong.items():
        parts.append(Text(f"{name}: wrong, so it has no figures: {fault}", style="red"))
    for name, reason in result.absent.items():
        parts.append(Text(f"{name}: cannot run here: {reason}"))
    for name, reason in result.unjudged.items():
        parts.append(Text(f"{name}: not checked: {reason}"))
    for name, figures in result.fresh.items():
        if "error" in figures:
            parts.append(Text(f"{name}: failed in a process of its own: {figures['error']}"))
    return Group(*parts, *map(Text, _basis(result)))


def _figures(result: Result) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    headings = ("step, ms", "quartiles", "fastest", "times ort_accel's", "95 % interval", "GFLOP/s")
    table.add_column("")
    for heading in (*headings, "first step, s", "peak MiB: first", "later", "in use"):
        table.add_column(heading, justify="right")
    for name, times in result.times.items():
        ratio = result.ratios.get(name)
        fresh = result.fresh.get(name, {})
        table.add_row(
            name,
            f"{times.median * 1e3:.1f}",
            f"{times.lower_quartile * 1e3:.1f}-{times.upper_quartile * 1e3:.1f}",
            f"{times.min * 1e3:.1f}",
            f"{ratio.ratio:.2f}x" if ratio else "",
            f"{ratio.low:.2f}-{ratio.high:.2f}" if ratio else "",
            f"{result.gflop / times.median:.0f}" if result.gflop else "",
            *(_number(fresh.get(key), digits) for key, digits in _FRESH),
        )
    return table


_FRESH = (("cold_seconds", 1), ("first_step_mib", 0), ("later_steps_mib", 0), ("in_use_mib", 0))


def _number(value: float | str | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _basis(result: Result) -> list[str]:
    facts = result.machine
    speeds = facts["matmul_gflops"]
    lines = [
        f"{facts['cpu']} (family {facts['cpu_family']}, model {facts['cpu_model']}), {facts['usable_cores']} of "
        f"{facts['cores']} cores, {facts['threads']} threads; load {_load(facts.get('load_before'))} before, "
        f"{_load(facts.get('load_after'))} after",
        f"matrix products here, GFLOP/s: {', '.join(f'{name} {speed:.0f}' for name, speed in speeds.items())}",
        f"torch {facts['torch']}, {facts['onnxruntime']}, python {facts['python']}",
    ]
    if result.gflop:
        bound = result.gflop / max(speeds.values())
        share = f"{result.ort_share:.0%} of them run by ONNX Runtime, " if result.ort_share is not None else ""
        lines.insert(0, f"a step is {result.gflop:.1f} GFLOP, {share}at least {bound * 1e3:.0f} ms at the speed below")
    return lines


def _load(load: list[float] | None) -> str:
    return str(load[0]) if load else "unknown"
