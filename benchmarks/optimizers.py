"""A step of FusedAdam beside PyTorch's AdamW, and the checks of 1,000 gradients beside DeepSpeed's. See `--help`."""

from __future__ import annotations

import json
import os
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from ort_accel.cli.benchmark import machine
from ort_accel.cli.benchmark.timing import compare, in_turns, summary
from ort_accel.optim import AdamWMode, FusedAdam
from ort_accel.optim.modifiers import deepspeed as modifier

HYPER: dict[str, Any] = {"lr": 1e-4, "eps": 1e-8, "weight_decay": 0.01}
OURS = "FusedAdam, AdamW of PyTorch"
BUILDERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    OURS: lambda params: FusedAdam(params, adam_w_mode=AdamWMode.ADAMW_TORCH, **HYPER),
    "FusedAdam, AdamW of Hugging Face": lambda params: FusedAdam(params, **HYPER),
    "torch AdamW(fused=True)": lambda params: torch.optim.AdamW(params, fused=True, **HYPER),
    "torch AdamW(foreach=True)": lambda params: torch.optim.AdamW(params, foreach=True, **HYPER),
    "torch AdamW(foreach=False)": lambda params: torch.optim.AdamW(params, foreach=False, **HYPER),
}


def measure(
    layers: Annotated[int, typer.Option(min=1, help="Layers of 768; 14 of them are 99M parameters.")] = 14,
    tensors: Annotated[int, typer.Option(min=1, help="Gradients for the checks, of 64 values each.")] = 1000,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds that count.")] = 11,
    threads: Annotated[int, typer.Option(min=1, help="Threads of PyTorch.")] = os.cpu_count() or 1,
    apart: Annotated[bool, typer.Option(help="Give each optimizer parameters and moments of its own.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures here.")] = None,
) -> None:
    """Measure optimizer steps, and checks for overflow and norms, each contender in turn in every round."""
    torch.set_num_threads(threads)
    _agree()
    shapes = [shape for _ in range(layers) for shape in _layer()]
    result: dict[str, Any] = {
        "machine": machine.facts(threads),
        "parameters": sum(torch.Size(shape).numel() for shape in shapes),
        "tensors": len(shapes),
        "checked_tensors": tensors,
        "apart": apart,
        "steps": _timed(_steps(shapes, apart), OURS, rounds),
    }
    for name, contenders in _checks(tensors).items():
        typer.echo(name)
        result[name] = _timed(contenders, "ort_accel", rounds * 5)
    result["machine"]["load_after"] = machine.load()
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")


def _layer(width: int = 768) -> list[Sequence[int]]:
    square, wide, tall = (width, width), (4 * width, width), (width, 4 * width)
    return [*([square, (width,)] * 4), wide, (4 * width,), tall, (width,), *([(width,)] * 4)]


def _steps(shapes: list[Sequence[int]], apart: bool) -> dict[str, Callable[[], None]]:
    """One optimizer each, on the same parameters and moments: where memory lies is worth two per cent here."""
    params = _parameters(shapes)
    moments = [(torch.zeros_like(param), torch.zeros_like(param)) for param in params]
    steps: dict[str, Callable[[], None]] = {}
    for name, build in BUILDERS.items():
        own = _parameters(shapes) if apart else params
        optimizer = build(own)
        for param, (first, second) in zip(() if apart else own, () if apart else moments, strict=True):
            optimizer.state[param] = {"step": torch.zeros(()), "exp_avg": first, "exp_avg_sq": second}
        steps[name] = optimizer.step  # type: ignore[assignment]
    return steps


def _parameters(shapes: list[Sequence[int]]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    return params


def _agree() -> None:
    """Before anything is timed: FusedAdam and AdamW(fused=True) give the same parameters, to the bit."""
    results = []
    for name in (OURS, "torch AdamW(fused=True)"):
        params = _parameters(_layer())
        optimizer = BUILDERS[name](params)
        for _ in range(3):
            optimizer.step()
        results.append(params)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))


def _checks(count: int) -> dict[str, dict[str, Callable[[], object]]]:
    """DeepSpeed's own methods and ours, on the gradients of one process, without a network between."""
    import deepspeed.comm as dist
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29533",
    }
    dist.init_distributed("gloo")
    grads = [torch.randn(64) for _ in range(count)]
    params = [nn.Parameter(grad) for grad in grads]
    holder = types.SimpleNamespace(
        averaged_gradients={0: grads},
        params_in_partition={0: params},
        bit16_groups=[params],
        dp_process_group=None,
        device=torch.device("cpu"),
        model_parallel_rank=0,
        _has_inf_or_nan=DeepSpeedZeroOptimizer._has_inf_or_nan,
        _model_parallel_all_reduce=lambda **_: None,
    )
    for name in ("has_overflow_partitioned_grads_serial", "get_grad_norm_direct"):
        setattr(holder, name, types.MethodType(getattr(DeepSpeedZeroOptimizer, name), holder))
    check, norm = modifier.overflow_check(holder), modifier.norm(holder)
    assert bool(check()) == bool(holder.has_overflow_partitioned_grads_serial()) is False
    torch.testing.assert_close(norm(grads, params), holder.get_grad_norm_direct(grads, params), rtol=1e-6, atol=0)
    theirs = holder.has_overflow_partitioned_grads_serial, lambda: holder.get_grad_norm_direct(grads, params)
    return {
        "overflow_check": {"ort_accel": lambda: bool(check()), "DeepSpeed": lambda: bool(theirs[0]())},
        "norm": {"ort_accel": lambda: norm(grads, params), "DeepSpeed": theirs[1]},
    }


def _timed(contenders: dict[str, Callable[[], Any]], base: str, rounds: int) -> dict[str, Any]:
    seconds = in_turns(contenders, rounds, warmup=2)
    ratios = {name: compare(values, seconds[base]) for name, values in seconds.items() if name != base}
    for name, values in seconds.items():
        beside = f"  {ratios[name].ratio:6.2f} times {base}'s" if name in ratios else ""
        typer.echo(f"{name:34} {1e3 * summary(values).median:9.3f} ms{beside}")
    return {
        "seconds": {name: summary(values).to_dict() for name, values in seconds.items()},
        "ratios": {name: ratio.to_dict() for name, ratio in ratios.items()},
    }


if __name__ == "__main__":
    typer.run(measure)
