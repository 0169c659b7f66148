"""Run a folder of another project's tests as they come, and again with every model that they train on the engine.

    python benchmarks/peers/run.py --name transformers-trainer --source "transformers 5.23.0" --way callback \\
        --folder /path/to/transformers -- tests/trainer/test_trainer.py -k "not deepspeed"
    python benchmarks/peers/run.py --table

Only tests that pass as they come are run again. Each file has a process (but for --together) and each test a time limit
of its own, so that one that hangs or crashes costs no other. The sources are not part of this project: name a folder
that has them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl")

Outcomes = dict[str, dict[str, Any]]
"""What each test came to, by its name."""


def main() -> None:
    """The command."""
    given = _parser().parse_args()
    if given.table:
        print(table())
        return
    result = compare(given)
    path = RESULTS / f"{time.strftime('%Y-%m-%d')}-peers-{given.name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(table([path]))
    for name, (before, after) in result["differences"].items():
        print(f"{name}\n  {before}\n  {after}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--table", action="store_true", help="print the table of all results that were written")
    parser.add_argument("--name", help="the name of the result")
    parser.add_argument("--source", help="which project's tests these are, of which version or commit")
    parser.add_argument("--way", choices=("callback", "launch", "train"), default="callback")
    parser.add_argument("--folder", type=Path, help="where the tests are run")
    parser.add_argument("--timeout", type=int, default=120, help="seconds a test may take as it comes")
    parser.add_argument("--patience", type=int, default=5, help="how many times as long it may take on the engine")
    parser.add_argument("--together", action="store_true", help="run all files in one process, which starts sooner")
    parser.add_argument("--note", default="", help="what is to be said beside the counts")
    parser.add_argument("tests", nargs="*", help="files, and arguments of pytest after the first that begins with -")
    return parser


def compare(given: argparse.Namespace) -> dict[str, Any]:
    """Run the tests in both ways, and say which of those that pass as they come do not pass on the engine."""
    stock = _run_files(given, "stock", given.timeout, None)
    passed = {name for name, found in stock.items() if found["outcome"] == "passed"}
    ours = _run_files(given, given.way, given.timeout * given.patience, passed)
    lost = {name for name in passed if ours.get(name, {}).get("outcome") != "passed"}
    on_engine = {name for name in passed - lost if ours[name]["segments"]}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "source": given.source,
        "way": given.way,
        "selection": " ".join(given.tests),
        "note": given.note,
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: version(name) for name in PACKAGES},
        "stock": dict(Counter(found["outcome"] for found in stock.values())),
        "as_stock": len(passed) - len(lost),
        "with_engine_segments": len(on_engine),
        "without_engine_segments": sorted(passed - lost - on_engine),
        "models": sum(ours[name]["models"] for name in passed - lost),
        "seconds": [round(sum(runs[name]["seconds"] for name in passed - lost), 1) for runs in (stock, ours)],
        "differences": {name: ["passed", _told(ours.get(name))] for name in sorted(lost)},
    }


def _told(found: dict[str, Any] | None) -> str:
    return "did not run" if found is None else f"{found['outcome']}: {found.get('error', '')}"


def _run_files(given: argparse.Namespace, way: str, timeout: int, only: set[str] | None) -> Outcomes:
    found: Outcomes = {}
    first_option = next((i for i, one in enumerate(given.tests) if one.startswith("-")), len(given.tests))
    files = given.tests[:first_option]
    for group in [files] if given.together else [[file] for file in files]:
        here = _run_group(given.folder, group, given.tests[first_option:], way, timeout, only)
        print(f"{way}: {' '.join(group)}: {dict(Counter(one['outcome'] for one in here.values()))}", flush=True)
        found |= here
    return found


def _run_group(
    folder: Path, files: list[str], options: list[str], way: str, timeout: int, only: set[str] | None
) -> Outcomes:
    """Run the tests of some files; after a crash or a test that hangs, those that are left, in a new process."""
    found: Outcomes = {}
    for _ in range(20):
        before = len(found)
        found |= _one_process(folder, files, options, way, timeout, only, set(found))
        hanging = [name for name, one in found.items() if one["outcome"] == "began"]
        for name in hanging:
            found[name] = {"outcome": "died", "error": f"crashed, or took more than {timeout} s", **_NOTHING}
        if not hanging or len(found) == before:
            return found
    return found


_NOTHING = {"seconds": 0.0, "models": 0, "segments": 0}


def _one_process(
    folder: Path, files: list[str], options: list[str], way: str, timeout: int, only: set[str] | None, done: set[str]
) -> Outcomes:
    with tempfile.TemporaryDirectory() as place:
        out = Path(place, "lines")
        out.touch()
        choice = Path(place, "choice.json")
        choice.write_text(json.dumps({"only": None if only is None else sorted(only), "done": sorted(done)}))
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.peers.plugin", "-q"]
        command += ["-p", "no:cacheprovider", "--timeout", str(timeout), "--timeout-method", "signal", *files, *options]
        told = {"ORT_ACCEL_PEERS": way, "ORT_ACCEL_PEERS_OUT": str(out), "ORT_ACCEL_PEERS_CHOICE": str(choice)}
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with Path(place, "output").open("w") as output:
            environment = {**os.environ, **told, **quiet, "PYTHONPATH": path}
            subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=output, check=False)
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        if not lines and only is None and not done:
            print(Path(place, "output").read_text()[-2000:])
    return {line.pop("test"): line for line in lines}


def table(paths: list[Path] | None = None) -> str:
    """A table of results, one a line."""
    rows = [
        "| tests of | selection | pass as they come | of these on the engine | of these with graphs on the engine "
        "| seconds | date |",
        "|---|---|---|---|---|---|---|",
    ]
    for path in paths or sorted(RESULTS.glob("*-peers-*.json")):
        found = json.loads(path.read_text())
        stock, ours = found["seconds"]
        rows.append(
            f"| {found['source']} | `{found['selection']}` | {found['stock'].get('passed', 0)} | {found['as_stock']} "
            f"| {found['with_engine_segments']} | {stock:.0f}, {ours:.0f} | {found['date']} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
