"""`ort-accel explain`: the parts of a model that ONNX Runtime runs, those that PyTorch runs, and the reasons."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ort_accel.cli.exits import errors_as_exit_code

if TYPE_CHECKING:
    from torch import nn

    from ort_accel.reporting.report import Report
    from ort_accel.reporting.segments import Segment


def explain(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, its config.json, or a known name.")],
    config: Annotated[str | None, typer.Option(metavar="FILE", help="The configuration of ort_accel.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of the made-up batch.")] = 2,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each row.")] = 16,
    layers: Annotated[int | None, typer.Option(min=1, help="Build so many layers only, to spare memory.")] = None,
    memory: Annotated[bool, typer.Option(help="Predict and measure the peak of a step, too.")] = False,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw what --memory found.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report for machines.")] = False,
) -> None:
    """Run one training step of a model on made-up inputs, and say who runs what and why.

    The weights are random and nothing is downloaded. Known names build a tiny model: bert, bert-mlm, gpt2, llama,
    qwen3-moe, t5, vit. The exit code is 0, or 2 if the step could not be run.

    \b
    Examples:
      ort-accel explain bert
      ort-accel explain ./my-model --config configs/default.yaml --batch 8 --length 128
      ort-accel explain ./my-model/config.json --layers 2 --json
      ort-accel explain ./my-model --batch 16 --length 512 --memory --png memory.png
    """
    from ort_accel.observe.report_file import save_report

    with errors_as_exit_code():
        if png is not None:
            _check_png(png)
        report = _explained(model, config, batch, length, layers, memory or png is not None)
        if png is not None:
            save_report(report, png)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1))
        return
    from ort_accel.observe.feature_table import print_feature_table

    print_feature_table(report)
    typer.echo("\n".join(_segment_lines(report.segments)))


def _check_png(file: Path) -> None:
    """Refuse an unusable file before the model is trained."""
    from ort_accel.errors import OrtAccelError
    from ort_accel.files import why_not_writable

    if file.suffix != ".png":
        raise OrtAccelError(f"--png: {str(file)!r} does not end in .png; name a file that does")
    if why := why_not_writable(file):
        raise OrtAccelError(f"--png: {file} cannot be written: {why}; name a file where you may write")


MEASURED_STEPS = 5
"""Steps until a peak is measured: two compile, one fills the trimmed heap, one is measured, and one ends that."""


def _explained(
    name: str, config: str | None, batch: int, length: int, layers: int | None, memory: bool = False
) -> Report:
    from torch.optim import AdamW

    import ort_accel
    from ort_accel.cli.quiet import quiet
    from ort_accel.cli.random_models import loss_of
    from ort_accel.config import load_config
    from ort_accel.errors import OrtAccelError

    settings = load_config(config)
    if not settings.engine.enabled:
        raise OrtAccelError("engine.enabled is false, so there is nothing to explain")
    module, inputs = _model_and_inputs(name, batch, length, layers)
    settings = quiet(settings)
    if memory:
        observe = settings.observe.model_copy(update={"memory_stats": True})
        settings = settings.model_copy(update={"observe": observe})
    ort_accel.accelerate(module, settings)
    optimizer = AdamW(module.parameters()) if memory else None
    try:
        for _ in range(MEASURED_STEPS if memory else 1):
            module.zero_grad()
            outputs = module(**inputs)
            loss_of(outputs).backward()  # type: ignore[no-untyped-call]
            if optimizer is not None:
                optimizer.step()
    except Exception as error:
        cause = next((e for e in _causes(error) if isinstance(e, OrtAccelError)), error)
        raise OrtAccelError(f"the step failed: {type(cause).__name__}: {cause}") from error
    return ort_accel.report(module)


def _model_and_inputs(name: str, batch: int, length: int, layers: int | None) -> tuple[nn.Module, dict[str, Any]]:
    from ort_accel.cli.benchmark.workload import MODELS, Workload, batch_of, build
    from ort_accel.cli.random_models import inputs_for, model_from

    if name in MODELS:
        tiny = Workload(name, hidden=32, layers=layers or 2, heads=2, batch=batch, length=length, vocab=128)
        return build(tiny), batch_of(tiny)
    model = model_from(name, layers)
    return model, inputs_for(model, batch, length)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__


def _segment_lines(segments: list[Segment]) -> Iterator[str]:
    graph = ""
    for segment in segments:
        if segment.graph != graph:
            graph = segment.graph
            yield f"{graph}, in the order of running:"
        ops = ", ".join(f"{op} x{count}" if count > 1 else op for op, count in segment.ops.items())
        yield f"  {segment.runner.value}, {segment.nodes} nodes, {segment.flops / 1e9:,.3f} GFLOP: {ops}"
