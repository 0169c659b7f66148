"""Teach a small Llama to go on with news articles, several in each row, on ONNX Runtime and on eager PyTorch.

python examples/hf/run_packed_sft.py --compare_eager
python examples/hf/run_packed_sft.py --max_length 2048 --per_device_train_batch_size 2
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import run_sft
from compare import exit_code
from rich.console import Console
from run_sft import ScriptArguments
from transformers import HfArgumentParser


@dataclass
class Arguments(run_sft.Arguments):
    """All arguments of TRL's trainer, with packing: a batch is one row of articles, each of which attends to itself."""

    output_dir: str | None = "out/packed_sft"
    packing: bool = True
    max_length: int | None = 1024
    per_device_train_batch_size: int = 1
    per_device_eval_batch_size: int = 1


def main() -> int:
    """Read the arguments, then train."""
    script, training = HfArgumentParser((ScriptArguments, Arguments)).parse_args_into_dataclasses()
    return exit_code(lambda: run_sft.run(script, training, Console()))


if __name__ == "__main__":
    sys.exit(main())
