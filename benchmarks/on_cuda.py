"""Check everything about CUDA devices that only a machine with one can tell: `python benchmarks/on_cuda.py`.

Operators, loss and gradients of whole models, dropout masks, streams and memory are compared with eager PyTorch on the
same device, and values are moved to host memory and back. Steps are timed in eager PyTorch, in Inductor and on
ort_accel, in turns. The most telling checks come first. The file with the results is written anew after each check, so
that a run that is killed, or whose `--budget` is over, leaves all it found. A check that ends the process, or leaves
the device unusable, is a finding, and a new process goes on with the next one. The exit code is 1 if anything differs
from eager. `--device cpu --tiny` tries the script itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cuda_bench import Bench, Finding
from benchmarks.cuda_checks import Check, checks
from ort_accel.cli.benchmark import machine
from ort_accel.files import write_aside

RESULTS = Path(__file__).parent / "results"
GRACE_SECONDS = 20
"""How long a check may go on after the budget is over."""
UNUSABLE = ("CUDA error", "AcceleratorError", "CUDNN_STATUS_EXECUTION_FAILED", "CUBLAS_STATUS_EXECUTION_FAILED")
"""Texts of faults after which a process can use its device no more."""
GO_ON, DONE = 75, 0
"""Exit codes of a process that leaves the rest to the next one, and of one that ran all checks or out of time."""


def run_checks(bench: Bench, record: dict[str, Any], path: Path, deadline: float) -> int:
    """Run what the record does not have yet; returns GO_ON where a new process must continue."""
    for each in _remaining(checks(bench), record):
        if time.time() >= deadline:
            break
        record["under_way"] = each.name
        _write(path, record)
        is_usable = _run(each, bench, record)
        _write(path, record)
        if not is_usable:
            return GO_ON
    return DONE


def _remaining(every: Sequence[Check], record: Mapping[str, Any]) -> list[Check]:
    return [each for each in every if each.name not in record["ended"]]


def _run(each: Check, bench: Bench, record: dict[str, Any]) -> bool:
    """Run one check and add what it found to the record; False if the device cannot be used any more."""
    try:
        each.run(bench)
    except Exception as error:
        bench.findings.append(Finding(each.name, False, f"{type(error).__name__}: {str(error)[:1000]}"))
    is_usable = not any(text in finding.detail for finding in bench.findings for text in UNUSABLE)
    record["findings"] += [dataclasses.asdict(finding) for finding in bench.findings]
    record["figures"] |= bench.figures
    record["times"] += bench.times
    record["ended"].append(each.name)
    record["under_way"] = None
    bench.findings.clear()
    bench.times.clear()
    torch._dynamo.reset()
    if bench.is_cuda and is_usable:
        torch.cuda.empty_cache()
    return is_usable


def _write(path: Path, record: Mapping[str, Any]) -> None:
    write_aside(path, json.dumps(record, indent=1).encode())


def _begun(path: Path) -> dict[str, Any]:
    """The record so far; a check during which a process ended is a finding in it."""
    if not path.exists():
        return {"machine": {}, "findings": [], "figures": {}, "times": [], "ended": [], "under_way": None}
    record: dict[str, Any] = json.loads(path.read_text())
    if record["under_way"] is not None:
        name = record["under_way"]
        record["findings"].append(dataclasses.asdict(Finding(name, False, "the process ended during this check")))
        record["ended"].append(name)
        record["under_way"] = None
        _write(path, record)
    return record


def _drop_faults(path: Path) -> None:
    """Forget the checks of an earlier run that found a fault, so that they run again."""
    record = _begun(path)
    faulty = {finding["name"] for finding in record["findings"] if not finding["is_right"]}
    record["findings"] = [finding for finding in record["findings"] if finding["is_right"]]
    record["ended"] = [name for name in record["ended"] if name not in faulty]
    _write(path, record)


def _child(options: argparse.Namespace) -> int:
    device = torch.device(options.device, 0 if options.device == "cuda" else None)
    record = _begun(options.out)
    record["machine"] = record["machine"] or facts(device)
    _write(options.out, record)
    bench = Bench(device, options.tiny, options.rounds)
    with _device(device):
        return run_checks(bench, record, options.out, options.deadline)


def _device(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def facts(device: torch.device) -> dict[str, Any]:
    """The device and what drives it."""
    found = machine.facts(torch.get_num_threads())
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        found |= {"device": torch.cuda.get_device_name(device), "memory": memory, "cuda": torch.version.cuda}
    return found


def supervise(options: argparse.Namespace) -> None:
    """Run the checks in processes, one after the other, until all are run or the budget is over."""
    command = [sys.executable, __file__, "--device", options.device, "--rounds", str(options.rounds)]
    command += ["--out", str(options.out), "--deadline", str(options.deadline)] + ["--tiny"] * options.tiny
    while time.time() < options.deadline:
        try:
            code = subprocess.run(command, timeout=options.deadline + GRACE_SECONDS - time.time()).returncode
        except subprocess.TimeoutExpired:
            break
        if code == DONE:
            break
        if not options.out.exists():
            raise SystemExit(f"the checks could not begin: exit code {code}")
    options.record = _begun(options.out)
    _write(options.out, options.record)


def tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """What was found, for people."""
    findings = record["findings"]
    wrong = [finding for finding in findings if not finding["is_right"]]
    table = Table(
        "what differs from eager", "how", title=f"{len(findings) - len(wrong)} of {len(findings)} are eager's"
    )
    for finding in wrong:
        table.add_row(finding["name"], finding["detail"])
    yield table
    if record["figures"]:
        table = Table("measured", "")
        for name, text in record["figures"].items():
            table.add_row(name, text)
        yield table
    for measurement in record["times"]:
        table = Table("contender", "median ms", "times ort_accel's", "first step s", title=measurement["workload"])
        for name, seconds in measurement["seconds"].items():
            ratio = measurement["ratios"].get(name)
            first = f"{measurement['first_step'][name]:.1f}"
            table.add_row(name, f"{1e3 * seconds['median']:.2f}", f"{ratio['ratio']:.2f}" if ratio else "1", first)
        yield table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks within the budget; 0 if all that ran are eager's."""
    options = _options(arguments)
    if options.deadline:
        return _child(options)
    options.out = options.out or RESULTS / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{options.device}.json"
    if options.resume:
        _drop_faults(options.out)
    else:
        options.out.unlink(missing_ok=True)
    options.deadline = time.time() + options.budget
    supervise(options)
    console = Console(width=140)
    console.print(*tables(options.record))
    console.print(f"{len(options.record['ended'])} checks were run; written to {options.out}")
    return int(not all(finding["is_right"] for finding in options.record["findings"]))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--budget", type=float, default=3600, metavar="SECONDS", help="begin no check after these")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each timed step")
    parser.add_argument("--tiny", action="store_true", help="small models and few checks: tries the script")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write; default: one in benchmarks/results/")
    parser.add_argument("--resume", action="store_true", help="go on with the file, and repeat what was wrong in it")
    parser.add_argument("--deadline", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
