"""Run a training script with the models that it prepares on ONNX Runtime.

    python -m ort_accel.run [--ort_config FILE] [-m] script.py [arguments of the script]

Works under a launcher too: `accelerate launch -m ort_accel.run script.py`, `torchrun -m ort_accel.run script.py`.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import io
import os
import runpy
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from ort_accel.errors import OrtAccelError

PROGRAM = "ort_accel.run"


def main() -> None:
    """Run the command line's script, and end the process as the script ended."""
    try:
        run(sys.argv[1:])
    except (Exception, SystemExit) as error:
        if not _is_in_process_group():
            raise
        end(_print_error(error))
    if _is_in_process_group():
        end(0)


def run(arguments: Sequence[str]) -> None:
    """Run a script as `python` would, in this process; exits with code 2 where ort_accel refuses something."""
    given = _parser().parse_args(arguments)
    try:
        _activate_and_run(given)
    except OrtAccelError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        _explain_lack_of_memory(error)
        raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--ort_config", "--ort-config", metavar="FILE", help="ort_accel's YAML, or accelerate's with ort_accel_config:"
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is named as a module, as for python -m")
    parser.add_argument("script")
    parser.add_argument("script_arguments", nargs=argparse.REMAINDER, metavar="...")
    return parser


def _explain_lack_of_memory(error: BaseException) -> None:
    from ort_accel.memory.out_of_memory import explain_out_of_memory

    explain_out_of_memory(error)


def _activate_and_run(given: argparse.Namespace) -> None:
    if not given.module and not Path(given.script).is_file():
        raise OrtAccelError(f"{given.script}: no such script in {Path.cwd()}")
    from ort_accel.hf.accelerate_plugin import accelerate_all_models

    accelerate_all_models(given.ort_config)
    _set_up_cpu_processes()
    _run(given.script, given.script_arguments, given.module)


def _set_up_cpu_processes() -> None:
    """Tell accelerate that processes on a machine without a GPU train together; otherwise each trains alone."""
    import torch

    if torch.accelerator.is_available() or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return
    if _is_set("ACCELERATE_USE_FSDP"):
        raise OrtAccelError(
            "accelerate shards models with FSDP on GPUs only, and none is here; for processes on the CPU, set "
            "distributed_type: MULTI_CPU, or DEEPSPEED"
        )
    if _is_set("ACCELERATE_USE_DEEPSPEED"):
        from accelerate import PartialState

        PartialState(cpu=True)  # once the script itself asks for the CPU, accelerate drops DeepSpeed
    else:
        os.environ["ACCELERATE_USE_CPU"] = "true"


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in {"1", "true", "yes", "on"}


def _run(script: str, arguments: Sequence[str], is_module: bool) -> None:
    """Run a script under the name `__main__`, with the arguments and the import path that `python` would give it."""
    sys.argv = [script, *arguments]
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            if not sys.flags.safe_path:
                sys.path[0] = str(Path(script).absolute().parent)
            runpy.run_path(script, run_name="__main__")
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            raise


def _is_in_process_group() -> bool:
    """True if this process is one of a process group, or was started to be one."""
    distributed = _distributed()
    return "WORLD_SIZE" in os.environ or (distributed is not None and distributed.is_initialized())


def _destroy_process_group() -> None:
    """Destroy the process group that the script left open: at the exit it can hang or print warnings."""
    distributed = _distributed()
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def _distributed() -> ModuleType | None:
    """Returns `torch.distributed`; None if torch was not imported or lacks it."""
    distributed: ModuleType | None = getattr(sys.modules.get("torch"), "distributed", None)
    return distributed if distributed is not None and distributed.is_available() else None


def _print_error(error: Exception | SystemExit) -> int:
    """Print the error of a script that failed as Python does; returns the exit code."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    if isinstance(error.code, int):
        return error.code & 0xFF
    if error.code is not None:
        print(error.code, file=sys.stderr)
    return int(error.code is not None)


def end(code: int) -> NoReturn:
    """End this process as Python does, without finalizing the interpreter.

    Threads of a process group may outlive the group, since default arguments of functions in `torch.distributed.nn`
    and DeepSpeed hold it. Such a thread frees tensors after its last operation, and needs the interpreter for that.
    During finalization, Python 3.11 ends the thread within C++'s destructors, and a signal ends the process. A finished
    training would count as failed. A script that fails would also wait for threads that wait for other processes. So
    exit handlers run, files are flushed, and the process ends.
    """
    if code == 0:
        _destroy_process_group()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    gc.collect()
    for file in gc.get_objects():
        if type(file) in _BUFFERED:
            with suppress(OSError, ValueError):
                file.flush()
    os._exit(code)


_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


if __name__ == "__main__":
    main()
