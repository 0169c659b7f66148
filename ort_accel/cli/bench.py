"""`ort-accel bench`: the time and memory of a training step, against eager PyTorch and Inductor."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ort_accel.cli.exits import errors_as_exit_code
from ort_accel.files import why_not_writable


class ModelName(StrEnum):
    """The models that can be built at any size."""

    BERT = "bert"
    BERT_MLM = "bert-mlm"
    GPT2 = "gpt2"
    LLAMA = "llama"
    QWEN3_MOE = "qwen3-moe"
    T5 = "t5"
    VIT = "vit"


class Precision(StrEnum):
    """The precision of a step."""

    FP32 = "fp32"
    BF16 = "bf16"


class Contender(StrEnum):
    """The library that runs the step."""

    EAGER = "eager"
    INDUCTOR = "inductor"
    ORT_ACCEL = "ort_accel"


STDOUT = Path("-")


def bench(
    model: Annotated[ModelName, typer.Option(help="Its kind, with random weights.")] = ModelName.BERT,
    hidden: Annotated[int, typer.Option(min=1, help="Width of a layer.")] = 384,
    layers: Annotated[int, typer.Option(min=1, help="How many layers.")] = 6,
    heads: Annotated[int, typer.Option(min=1, help="Heads of attention in a layer.")] = 6,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of keys and values (llama).")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a text, or patches of an image.")] = 128,
    vocab: Annotated[int, typer.Option(min=8, help="Different tokens.")] = 8000,
    dropout: Annotated[float, typer.Option(min=0, max=0.9, help="Its probability.")] = 0.0,
    density: Annotated[float, typer.Option(min=0.01, max=1, help="The share of tokens that are not padding.")] = 1.0,
    labelled: Annotated[
        float | None,
        typer.Option(min=0.01, max=1, help="The share of all tokens with a label (bert-mlm, gpt2, llama)."),
    ] = None,
    checkpointing: Annotated[bool, typer.Option(help="The model's own gradient checkpointing.")] = False,
    precision: Annotated[Precision, typer.Option(help="bf16 is autocast.")] = Precision.FP32,
    steps: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 15,
    warmup: Annotated[int, typer.Option(min=0, help="Rounds before.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="As many as PyTorch takes without it.")] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="The configuration of ort_accel.")] = None,
    contenders: Annotated[
        list[Contender] | None, typer.Option("--contender", help="Measure only these; give it several times.")
    ] = None,
    fresh: Annotated[bool, typer.Option(help="Measure first steps and memory, in processes of their own.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write it; - prints it.")] = None,
) -> None:
    """Measure a training step (forward and backward) in eager PyTorch, in Inductor and on ONNX Runtime, taking turns.

    Loss and gradients are compared with eager's first: what gives others gets no figures. The exit code is 0, or 1 if
    something was wrong, or 2 if it could not begin.

    \b
    Examples:
      ort-accel bench
      ort-accel bench --model llama --kv-heads 2 --vocab 16000 --batch 4 --length 256 --json llama.json
      ort-accel bench --hidden 64 --layers 2 --heads 2 --contender eager --contender ort_accel --no-fresh
    """
    if hidden % heads or (kv_heads and heads % kv_heads):
        raise typer.BadParameter("--hidden must be a multiple of --heads, and --heads one of --kv-heads")
    if labelled is not None and labelled > density:
        raise typer.BadParameter(
            "--labelled is a share of all tokens, and padding has no label: --density must be larger"
        )
    if json_file not in (None, STDOUT) and (why := why_not_writable(json_file)):
        raise typer.BadParameter(f"--json: {json_file} cannot be written: {why}; name a file where you may write")
    import torch

    from ort_accel.cli.benchmark.run import Effort, run
    from ort_accel.cli.benchmark.workload import Workload
    from ort_accel.config import load_config

    sizes = hidden, layers, heads, kv_heads, batch, length, vocab
    size = Workload(model, *sizes, dropout, precision, density, labelled, checkpointing)
    effort = Effort(steps, warmup, threads or torch.get_num_threads(), fresh)
    with errors_as_exit_code():
        result = run(size, load_config(config), contenders or list(Contender), effort)
    _show(result, json_file)
    if result.wrong:
        raise typer.Exit(1)


def _show(result: object, json_file: Path | None) -> None:
    from rich.console import Console

    from ort_accel.cli.benchmark.run import Result
    from ort_accel.cli.benchmark.table import render

    assert isinstance(result, Result)
    text = json.dumps(result.to_dict(), indent=1)
    if json_file == STDOUT:
        typer.echo(text)
        return
    Console(width=None if Console().is_terminal else 160).print(render(result))
    if json_file is not None:
        json_file.write_text(text + "\n", encoding="utf-8")
