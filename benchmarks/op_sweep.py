"""Every operator of PyTorch with a gradient, through the backend against eager: `python benchmarks/op_sweep.py`.

Prints what did not match and what PyTorch still runs, and writes everything as JSON with `--json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.op_parity import Outcome, Verdict, check, full_name, operators
from ort_accel.runtime.installed_ort import installed_runtime


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep; 0 if nothing differs from eager."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    chosen = [op for op in operators(dtype) if not options.ops or {full_name(op), op.name} & set(options.ops)]
    console = Console(stderr=True)
    outcomes = [check(op, options.samples, dtype) for op in track(chosen, "sweep", console=console)]
    if options.json:
        options.json.write_text(json.dumps(_record(outcomes), indent=1))
    Console(width=160).print(*_tables(outcomes, options.all))
    return int(any(outcome.verdict in {Verdict.ERROR, Verdict.MISMATCH} for outcome in outcomes))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help="operators, such as nn.functional.gelu; all without")
    parser.add_argument("--samples", type=int, default=2, help="samples an operator")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "float16", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--all", action="store_true", help="list the operators that match, too")
    return parser.parse_args(arguments)


def _record(outcomes: list[Outcome]) -> dict[str, object]:
    runtime = installed_runtime()
    return {
        "runtime": f"{runtime.distribution} {runtime.version}",
        "torch": torch.__version__,
        "totals": dict(Counter(outcome.verdict.value for outcome in outcomes)),
        "operators": [outcome.to_dict() for outcome in outcomes],
    }


def _tables(outcomes: list[Outcome], everything: bool) -> list[Table]:
    return [_outcomes(outcomes, everything), _left_to_pytorch(outcomes), _totals(outcomes)]


def _outcomes(outcomes: list[Outcome], everything: bool) -> Table:
    table = Table("operator", "verdict", "run by ORT", "detail", title="through the backend, against eager")
    for outcome in outcomes:
        if everything or outcome.verdict is not Verdict.MATCH:
            table.add_row(outcome.name, outcome.verdict, f"{outcome.share:.0%}", outcome.detail[:200])
    return table


def _left_to_pytorch(outcomes: list[Outcome]) -> Table:
    """ATen operators that PyTorch runs, by how many operators of the sweep they are part of."""
    users: Counter[str] = Counter(op for outcome in outcomes for op in outcome.by_pytorch)
    reasons = {op: reason for outcome in outcomes for op, reason in outcome.reasons.items()}
    table = Table("ATen operator", "in operators", "reason", title="left to PyTorch, the most frequent")
    for op, count in users.most_common(40):
        table.add_row(op, str(count), reasons.get(op, ""))
    return table


def _totals(outcomes: list[Outcome]) -> Table:
    counts = Counter(outcome.verdict for outcome in outcomes)
    by_ort = sum((outcome.by_ort for outcome in outcomes), Counter())
    by_pytorch = sum((outcome.by_pytorch for outcome in outcomes), Counter())
    table = Table(*(verdict.value for verdict in Verdict), "nodes by ORT", "by PyTorch", "ATen operators by ORT")
    numbers = [counts[verdict] for verdict in Verdict] + [by_ort.total(), by_pytorch.total(), len(by_ort)]
    table.add_row(*map(str, numbers))
    return table


if __name__ == "__main__":
    sys.exit(main())
