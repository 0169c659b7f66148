"""Run a training script with the models that it prepares on ONNX Runtime.

    python -m ort_accel.run [--ort_config FILE] [-m] script.py [arguments of the script]

Works under a launcher too: `accelerate launch -m ort_accel.run script.py`, `torchrun -m ort_accel.run script.py`.
"""

from __future__ import annotations

import argparse
import gc
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from ort_accel.errors import OrtAccelError

PROGRAM = "ort_accel.run"


def run(arguments: Sequence[str]) -> None:
    """Run a script as `python` would, in this process; ends it with code 2 where ort_accel refuses something."""
    given = _parser().parse_args(arguments)
    try:
        if not given.module and not Path(given.script).is_file():
            raise OrtAccelError(f"{given.script}: no such script in {Path.cwd()}")
        _get_ready(given.ort_config)
        _run(given.script, given.script_arguments, given.module)
    except OrtAccelError as error:
        sys.exit(_said(error))
    _leave_the_group()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--ort_config", "--ort-config", metavar="FILE", help="ort_accel's YAML, or accelerate's with ort_accel_config:"
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is named as a module, as for python -m")
    parser.add_argument("script")
    parser.add_argument("script_arguments", nargs=argparse.REMAINDER, metavar="...")
    return parser


def _said(error: OrtAccelError) -> int:
    print(f"{PROGRAM}: {error}", file=sys.stderr)
    return 2


def _get_ready(config_file: str | None) -> None:
    from ort_accel.hf.accelerate_plugin import accelerate_all_models

    accelerate_all_models(config_file)
    _settle_on_the_cpu()


def _settle_on_the_cpu() -> None:
    """Tell accelerate that processes on a machine without a GPU train together; it would let each train alone."""
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

        PartialState(cpu=True)  # DeepSpeed is not asked for any more once the script itself says `cpu`
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


def _leave_the_group() -> None:
    """End what the script began with other processes: whoever leaves it open can hang or complain at its exit."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        gc.collect()  # a model that stands in a cycle would hold on to the group, and end its threads late
        distributed.destroy_process_group()


if __name__ == "__main__":
    run(sys.argv[1:])
