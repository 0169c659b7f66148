"""The work of `ort-accel launch`: accelerate's parser and launcher, with our runner in front of the script.

The functions of `accelerate.commands` used here are checked with accelerate 1.10 and 1.15.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

import torch
from accelerate.commands.config import default_config_file
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ort_accel.cli.accelerate_file import AccelerateFile
from ort_accel.errors import OrtAccelError
from ort_accel.hf.activation import usable_config
from ort_accel.memory.malloc_settings import COALESCING_TUNABLE, fragments_heap

RUNNER = "ort_accel.run"
PROGRAM = "ort-accel launch"
USAGE = f"{PROGRAM} [OPTIONS] SCRIPT [ARGUMENTS OF THE SCRIPT]"


def accelerate_help() -> str:
    """Returns the help of `accelerate launch`, with our option among its own."""
    sys.argv = [PROGRAM]  # accelerate shows the options that fit these arguments
    return _parser().format_help()


def launch(arguments: Sequence[str]) -> int:
    """Run a script with the arguments of `accelerate launch`; returns the exit code."""
    args = _parser().parse_args(arguments)
    _check_script(args)
    _check_options(args)
    file = _accelerate_file(args)
    has_section = file is not None and file.has_section
    source = args.ort_config or (file.name if file and has_section else None)
    usable_config(source)
    _put_runner_in_front(args, source)
    _set_up_cpus(args, file)
    if file is None:
        return _run_launcher(args)
    with tempfile.TemporaryDirectory() as folder:
        args.config_file = file.without_section(Path(folder))
        return _run_launcher(args)


def _parser() -> ArgumentParser:
    parser: ArgumentParser = launch_command_parser()
    parser.prog = PROGRAM
    parser.usage = USAGE
    parser.error = _fail  # type: ignore[method-assign]  # argparse's prints the usage of all options before its error
    parser.add_argument("--ort_config", metavar="FILE", help="The YAML file that sets up ort_accel.")
    return parser


def _fail(message: str) -> NoReturn:
    missing = message.startswith("the following arguments are required: training_script")
    what = "no script is named" if missing else message
    raise OrtAccelError(f"{what}; usage: {USAGE} (all options: {PROGRAM} --help)")


def _check_script(args: Namespace) -> None:
    """Refuse a missing script once, before each of the processes would."""
    script = args.training_script
    if args.no_python:
        raise OrtAccelError(
            "--no_python runs a program that is not Python, where no model can be reached; leave it out"
        )
    if args.module:
        if PathFinder.find_spec(script.partition(".")[0], [str(Path.cwd()), *sys.path]) is None:
            raise OrtAccelError(f"{script}: no such module in {Path.cwd()} or among what is installed")
    elif not Path(script).is_file():
        raise OrtAccelError(f"{script}: no such script{_similar(Path(script))}")


def _similar(script: Path) -> str:
    if not script.parent.is_dir():
        return f"; the folder {str(script.parent)!r} is not there either"
    close = get_close_matches(script.name, [other.name for other in script.parent.glob("*.py")], n=1)
    return f"; did you mean {script.parent / close[0]}?" if close else f" in {script.parent.absolute()}"


def _accelerate_file(args: Namespace) -> AccelerateFile | None:
    """Returns the configuration file that accelerate would read."""
    if args.config_file is not None:
        return AccelerateFile(args.config_file)
    return AccelerateFile(default_config_file) if Path(default_config_file).is_file() and not args.cpu else None


def _check_options(args: Namespace) -> None:
    """Refuse options that cannot go together with ort_accel."""
    if args.dynamo_backend not in (None, "no"):
        why = f"a model has one compiler, and with `{PROGRAM}` it is ort_accel"
        raise OrtAccelError(f"--dynamo_backend {args.dynamo_backend}: {why}; leave the option out")
    for option in ("tpu", "use_megatron_lm"):
        if getattr(args, option):
            raise OrtAccelError(f"--{option}: no ONNX Runtime trains there; leave the option out")


def _put_runner_in_front(args: Namespace, config_file: str | None) -> None:
    """Let accelerate start the runner as a module, with its options, the script and the script's arguments."""
    named = ["--ort_config", str(Path(config_file).absolute())] if config_file else []
    as_module = ["-m"] if args.module else []
    args.training_script_args = [*named, *as_module, args.training_script, *args.training_script_args]
    args.training_script, args.module = RUNNER, True


def _set_up_cpus(args: Namespace, file: AccelerateFile | None) -> None:
    """Set threads and memory for processes on CPUs. Torchrun starts several, where accelerate would need mpirun."""
    multi_cpu = file is not None and file.is_multi_cpu
    if args.mpirun_hostfile is not None or not (args.cpu or multi_cpu):
        return
    processes = args.num_processes or (file.processes if file and multi_cpu else 1)
    if args.num_cpu_threads_per_process is None:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // processes)))
    _join_freed_blocks()
    if processes > 1:
        args.cpu, args.multi_gpu, args.num_processes = False, True, processes
        os.environ["ACCELERATE_USE_CPU"] = "true"


def _join_freed_blocks() -> None:
    """Let glibc join freed blocks in the processes to be started, unless the user has set its cache."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if fragments_heap() and COALESCING_TUNABLE.partition("=")[0] not in tunables:
        os.environ["GLIBC_TUNABLES"] = f"{tunables}:{COALESCING_TUNABLE}".lstrip(":")


def _run_launcher(args: Namespace) -> int:
    """Let accelerate start the processes; returns the exit code of the first that failed, or 0."""
    try:
        launch_command(args)
    except subprocess.CalledProcessError as error:
        return error.returncode if error.returncode > 0 else 128 - error.returncode
    except ChildFailedError as error:
        code: int = error.get_first_failure()[1].exitcode
        print(error, file=sys.stderr)
        return code if code > 0 else 128 - code
    except (ValueError, ImportError, OSError) as error:
        raise OrtAccelError(str(error)) from error
    return 0
