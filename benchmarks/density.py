"""Padded batches and ignored labels: eager PyTorch, Inductor and ort_accel, taking turns. See `--help`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ort_accel.cli.benchmark.contenders import CONTENDERS, EVERYTHING, ORT_ACCEL
from ort_accel.cli.benchmark.run import Effort, run
from ort_accel.cli.benchmark.table import render
from ort_accel.cli.benchmark.workload import Workload
from ort_accel.config import load_config


@dataclass(frozen=True)
class Case:
    """A workload, and its contenders."""

    workload: Workload
    contenders: tuple[str, ...] = CONTENDERS


class Name(StrEnum):
    """The cases."""

    CLASSIFICATION = "classification"
    MLM = "mlm"
    CAUSAL = "causal"
    FULL = "full"


CASES = {
    Name.CLASSIFICATION: Case(Workload("bert", density=0.35)),
    Name.MLM: Case(Workload("bert-mlm", vocab=30_522, labelled=0.14)),
    Name.CAUSAL: Case(Workload("llama", batch=4, length=256, vocab=16_000, density=0.6, labelled=0.3)),
    Name.FULL: Case(Workload("bert"), contenders=(ORT_ACCEL, EVERYTHING)),
}


def density(
    cases: Annotated[
        list[Name] | None, typer.Option("--case", help="Measure only these; give it several times.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 15,
    warmup: Annotated[int, typer.Option(min=0, help="Rounds before.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="As many as PyTorch takes without it.")] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="The configuration of ort_accel.")] = None,
    inductor: Annotated[bool, typer.Option(help="Measure Inductor, too.")] = True,
    fresh: Annotated[bool, typer.Option(help="Measure first steps and memory, in processes of their own.")] = True,
    tiny: Annotated[bool, typer.Option(help="Tiny models of the same densities, to try the script.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write it.")] = None,
) -> None:
    """Measure training steps on batches with padding and ignored labels. The exit code is 1 if one was wrong."""
    settings, effort = load_config(config), Effort(steps, warmup, threads or torch.get_num_threads(), fresh)
    found: dict[str, Any] = {}
    console = Console(width=None if Console().is_terminal else 160)
    results = []
    for name in cases or list(Name):
        case = _tiny(CASES[name]) if tiny else CASES[name]
        names = [one for one in case.contenders if inductor or one != "inductor"]
        result = run(case.workload, settings, names, effort)
        results.append(result)
        found[name] = result.to_dict()
        console.print(render(result))
        console.print()
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if any(result.wrong for result in results):
        raise typer.Exit(1)


def _tiny(case: Case) -> Case:
    small = replace(case.workload, hidden=16, layers=1, heads=2, batch=4, length=10, vocab=40)
    return replace(case, workload=small)


if __name__ == "__main__":
    typer.run(density)
