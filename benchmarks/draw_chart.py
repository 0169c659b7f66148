"""Draws the README's chart of training steps, for light and dark displays, from `benchmarks/results/`. See `--help`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

from ort_accel.cli.benchmark.contenders import CONTENDERS, EAGER, ORT_ACCEL
from ort_accel.observe.page import Markup, tag

ROOT = Path(__file__).resolve().parents[1]
RESULTS, IMAGES, README = ROOT / "benchmarks" / "results", ROOT / "docs" / "images", ROOT / "README.md"
MACHINE = ("Intel Xeon", "6", "207")
"""The name of the processor in the caption, and its family and model in the files."""
ORDINALS = ("second", "third", "fourth", "fifth", "sixth")
"""Words in the names of files that are later runs of the same day."""

NAMES = {"eager": "eager PyTorch", "inductor": "Inductor", "ort_accel": "ort_accel"}

WIDTH, TOP, ROW_HEIGHT, BAR_HEIGHT, BAR_STEP = 880, 78, 56, 11, 13
SPEED_LEFT, MEMORY_LEFT, PANEL_WIDTH = 244, 590, 220


@dataclass(frozen=True)
class Theme:
    """The colours of a display: text, less important text, lines, and the bars of each contender."""

    ink: str
    quiet: str
    line: str
    bars: tuple[str, str, str]


THEMES = {
    "light": Theme("#1c1c1a", "#5d5c57", "#d6d5cf", ("#a5a49d", "#e0905f", "#2a78d6")),
    "dark": Theme("#f1f0ec", "#b3b1a9", "#45443f", ("#7d7c76", "#b5683b", "#4a95ea")),
}


@dataclass(frozen=True)
class Case:
    """A kind of training step, which has a row of the chart."""

    title: str
    model: str
    density: float = 1.0
    labelled: float | None = None
    dropout: float = 0.0

    def matches(self, workload: Mapping[str, Any]) -> bool:
        """True if a run measured this case. Dense models differ in their sizes."""
        wanted = {
            "model": self.model,
            "density": self.density,
            "labelled": self.labelled,
            "dropout": self.dropout,
            "precision": "fp32",
            "checkpointing": False,
        }
        return all(workload.get(key) == value for key, value in wanted.items())


CASES = (
    Case("BERT, 35 % of the tokens valid", "bert", density=0.35),
    Case("BERT, 14 % of the tokens labelled", "bert-mlm", labelled=0.14),
    Case("Llama, 60 % valid, 30 % labelled", "llama", density=0.6, labelled=0.3),
    Case("BERT, no padding, dropout 0.1", "bert", dropout=0.1),
    Case("BERT, no padding, no dropout", "bert"),
    Case("Llama, no padding, no dropout", "llama"),
)


@dataclass(frozen=True)
class Run:
    """A measured step: seconds of each contender, and MiB where memory was measured."""

    day: date
    number: int
    workload: Mapping[str, Any]
    machine: Mapping[str, Any]
    seconds: Mapping[str, float]
    mib: Mapping[str, float]


def draw_chart(
    results: Annotated[Path, typer.Option(metavar="FOLDER", help="The files of benchmarks.")] = RESULTS,
    images: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder to write to.")] = IMAGES,
) -> None:
    """Draw the newest run of each case on one machine, and print the caption for the README."""
    found = newest(results)
    images.mkdir(parents=True, exist_ok=True)
    for theme in THEMES:
        (images / f"steps-{theme}.svg").write_text(chart(found, theme), encoding="utf-8")
    typer.echo(caption(found))


def newest(results: Path) -> dict[Case, Run]:
    """Returns the newest run of each case on the machine of the chart."""
    runs = [run for run in read_runs(results) if (run.machine["cpu_family"], run.machine["cpu_model"]) == MACHINE[1:]]
    found = {case: [run for run in runs if case.matches(run.workload)] for case in CASES}
    return {case: max(ours, key=lambda run: (run.day, run.number)) for case, ours in found.items() if ours}


def read_runs(results: Path) -> Iterator[Run]:
    """Yields the runs of `step.py` and `density.py` in which no contender was wrong and none is missing."""
    for file in sorted(results.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        kind = file.name[len("2026-11-28-") :].partition("-")[0]
        parts = {"step": [content], "density": content.values()}.get(kind, [])
        number = max((1 + place for place, word in enumerate(ORDINALS) if f"-{word}-" in file.name), default=0)
        for part in parts:
            if not part["wrong"] and set(part["seconds"]) >= set(CONTENDERS):
                yield Run(
                    date.fromisoformat(file.name[: len("2026-11-28")]),
                    number,
                    part["workload"],
                    part["machine"],
                    {name: part["seconds"][name]["median"] for name in CONTENDERS},
                    {name: one["later_steps_mib"] for name, one in part["fresh_process"].items() if name in CONTENDERS},
                )


def caption(found: Mapping[Case, Run]) -> str:
    """Returns the machine, the versions and the days of all runs, as one sentence."""
    days = sorted({run.day for run in found.values()})
    machine = max(found.values(), key=lambda run: run.day).machine
    versions = f"torch {machine['torch'].partition('+')[0]}, {machine['onnxruntime'].replace('-cpu ', ' ')}"
    between = f"{days[0].day} to {days[-1]:%-d %B %Y}" if len(days) > 1 else f"{days[0]:%-d %B %Y}"
    return f"{MACHINE[0]} (family {MACHINE[1]}, model {MACHINE[2]}), {machine['cores']} cores, {versions}, {between}"


def chart(found: Mapping[Case, Run], theme: str) -> str:
    """Returns the chart as an SVG file."""
    style = THEMES[theme]
    height = TOP + ROW_HEIGHT * len(found) + 40
    fastest = max(run.seconds[EAGER] / seconds for run in found.values() for seconds in run.seconds.values())
    largest = max(mib / run.mib[EAGER] for run in found.values() for mib in run.mib.values())
    parts = [*_legend(style), *_panel_titles(style, height - 40, fastest, largest)]
    for place, (case, run) in enumerate(found.items()):
        parts += _row(case, run, TOP + ROW_HEIGHT * place, style, fastest, largest)
    parts.append(_text(caption(found), 8, height - 12, style.quiet, size=11))
    size = {"viewBox": f"0 0 {WIDTH} {height}", "width": WIDTH, "height": height, "role": "img"}
    described = "Speed and memory of training steps beside eager PyTorch and Inductor"
    svg = tag("svg", tag("title", described), parts, xmlns="http://www.w3.org/2000/svg", **size)
    return svg.replace("><", ">\n<") + "\n"


def _legend(style: Theme) -> Iterator[Markup]:
    for place, name in enumerate(CONTENDERS):
        x = SPEED_LEFT + 150 * place
        yield tag("rect", x=x, y=8, width=14, height=BAR_HEIGHT, rx=2, fill=style.bars[place])
        yield _text(NAMES[name], x + 20, 18, style.ink)


def _panel_titles(style: Theme, bottom: int, fastest: float, largest: float) -> Iterator[Markup]:
    titles = (
        (SPEED_LEFT, fastest, "Speed: steps a second, eager = 1", "longer is better"),
        (MEMORY_LEFT, largest, "Memory of a step, MiB", "shorter is better; bars in terms of eager's"),
    )
    for left, most, title, which in titles:
        yield _text(title, left, 46, style.ink, bold=True)
        yield _text(which, left, 62, style.quiet, size=11)
        x = round(left + PANEL_WIDTH / most, 1)
        yield tag("line", x1=x, x2=x, y1=TOP - 6, y2=bottom, stroke=style.line, stroke_dasharray="3 3")


def _row(case: Case, run: Run, top: int, style: Theme, fastest: float, largest: float) -> Iterator[Markup]:
    workload = run.workload
    sizes = f"{workload['batch']} x {workload['length']} tokens, {run.day:%-d %B}"
    yield _text(case.title, 8, top + 16, style.ink)
    yield _text(sizes, 8, top + 32, style.quiet, size=11)
    for place, name in enumerate(CONTENDERS):
        speed = run.seconds[EAGER] / run.seconds[name]
        y, colour, is_ours = top + BAR_STEP * place, style.bars[place], name == ORT_ACCEL
        ink = style.ink if is_ours else style.quiet
        yield from _bar(SPEED_LEFT, y, speed / fastest, colour, f"{speed:.2f}", ink, is_ours)
        if run.mib:
            share = run.mib[name] / run.mib[EAGER]
            yield from _bar(MEMORY_LEFT, y, share / largest, colour, f"{run.mib[name]:.0f}", ink, is_ours)
    if not run.mib:
        yield _text("not measured", MEMORY_LEFT, top + 22, style.quiet, size=11)


def _bar(left: int, y: int, share: float, colour: str, label: str, ink: str, bold: bool) -> Iterator[Markup]:
    width = round(PANEL_WIDTH * share, 1)
    yield tag("rect", x=left, y=y, width=width, height=BAR_HEIGHT, rx=2, fill=colour)
    yield _text(label, round(left + width + 6, 1), y + 10, ink, size=11, bold=bold)


def _text(words: str, x: float, y: float, ink: str, size: int = 13, bold: bool = False) -> Markup:
    weight = 600 if bold else None
    font = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
    return tag("text", words, x=x, y=y, fill=ink, font_size=size, font_weight=weight, font_family=font)


if __name__ == "__main__":
    typer.run(draw_chart)
