"""Each kernel of the native library beside eager's operators, in the same run. See `--help`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from ort_accel.cli.benchmark import machine
from ort_accel.cli.benchmark.timing import in_turns
from ort_accel.native.run_kernel import ELEMENTS, run_kernel

aten = torch.ops.aten
Pair = tuple[Callable[[], object], Callable[[], object]]
"""What eager does, and what the kernel does."""

ROWS, HIDDEN, INNER = 1024, 384, 1536
SCORES = (8, 6, 128, 128)
KEEP = 0.9


def dropout_pairs(dtype: torch.dtype) -> dict[str, Pair]:
    """Returns dropout, and its gradient."""
    x, out = torch.randn(ROWS, HIDDEN).to(dtype), torch.empty(ROWS, HIDDEN, dtype=dtype)
    count, element, state = x.numel(), ELEMENTS[dtype], torch.get_rng_state()
    mask, bits = torch.empty(ROWS, HIDDEN, dtype=torch.bool), torch.empty(count // 8, dtype=torch.uint8)
    return {
        "draw_mask": (lambda: mask.bernoulli_(KEEP), lambda: run_kernel("draw_mask", state, count, KEEP, mask)),
        "dropout": (
            lambda: aten.native_dropout(x, 1 - KEEP, True),
            lambda: run_kernel("dropout", state, x, count, KEEP, 1 / KEEP, element, bits, out),
        ),
        "dropout_backward": (
            lambda: aten.native_dropout_backward(x, mask, 1 / KEEP),
            lambda: run_kernel("apply_dropout", x, bits, count, 1 / KEEP, element, out),
        ),
    }


def norm_pairs(dtype: torch.dtype) -> dict[str, Pair]:
    """Returns both norms, and their gradients."""
    x, grad, out = (torch.randn(ROWS, HIDDEN).to(dtype) for _ in range(3))
    weight, bias, grad_weight, grad_bias = (torch.randn(HIDDEN).to(dtype) for _ in range(4))
    mean, rstd, element = torch.zeros(ROWS), torch.ones(ROWS), ELEMENTS[dtype]
    _, eager_mean, eager_rstd = aten.native_layer_norm(x, [HIDDEN], weight, bias, 1e-5)
    shape, types, grads = (ROWS, HIDDEN), (element, element), (out, grad_weight, grad_bias)
    given, kept = (grad, x, [HIDDEN], eager_mean, eager_rstd, weight, bias, [True] * 3), (mean, rstd, None)
    return {
        "layer_norm": (
            lambda: aten.native_layer_norm(x, [HIDDEN], weight, bias, 1e-5),
            lambda: run_kernel("layer_norm", x, None, weight, bias, *shape, 1e-5, *types, None, out, mean, rstd),
        ),
        "layer_norm_backward": (
            lambda: aten.native_layer_norm_backward(*given),
            lambda: run_kernel("layer_norm_backward", grad, x, weight, *kept, *shape, *types, *grads),
        ),
        "rms_norm": (
            lambda: functional.rms_norm(x, [HIDDEN], weight, 1e-5),
            lambda: run_kernel("rms_norm", x, None, weight, *shape, 1e-5, *types, None, out, rstd),
        ),
    }


def activation_pairs(dtype: torch.dtype) -> dict[str, Pair]:
    """Returns activations and their gradients, and silu with a gate."""
    x, grad, out, other = (torch.randn(ROWS, INNER).to(dtype) for _ in range(4))
    count, element, shape = x.numel(), ELEMENTS[dtype], (ROWS, INNER, INNER, INNER)
    functions = (
        ("gelu", functional.gelu, aten.gelu_backward),
        (
            "gelu_tanh",
            lambda x: functional.gelu(x, approximate="tanh"),
            lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh"),
        ),
        ("silu", functional.silu, aten.silu_backward),
        ("relu", torch.relu, lambda grad, x: aten.threshold_backward(grad, x, 0)),
        ("tanh", torch.tanh, aten.tanh_backward),
        ("sigmoid", torch.sigmoid, aten.sigmoid_backward),
    )
    pairs: dict[str, Pair] = {}
    for number, (name, forward, backward) in enumerate(functions):
        pairs[name] = (
            lambda forward=forward: forward(x),
            lambda number=number: run_kernel("activation", number, x, None, 1, count, element, out),
        )
        pairs[f"{name}_backward"] = (
            lambda backward=backward: backward(grad, x),
            lambda number=number: run_kernel("activation_backward", number, grad, x, None, 1, count, element, out),
        )
    pairs["swiglu"] = (
        lambda: functional.silu(x) * other,
        lambda: run_kernel("gated_activation", 2, x, other, *shape, element, out),
    )
    return pairs


def softmax_pairs(dtype: torch.dtype) -> dict[str, Pair]:
    """Returns softmax with a scale and a mask, and its gradient."""
    x, grad, out = (torch.randn(SCORES).to(dtype) for _ in range(3))
    mask, y, element = torch.zeros(8, 1, 1, 128, dtype=dtype), x.softmax(-1), ELEMENTS[dtype]
    rows = y[..., 0].numel()
    return {
        "softmax": (
            lambda: (x * 0.125 + mask).softmax(-1),
            lambda: run_kernel("softmax", x, mask, *SCORES, 128, 0, 0, 0.125, element, out),
        ),
        "softmax_backward": (
            lambda: aten._softmax_backward_data(grad, y, -1, dtype) * 0.125,
            lambda: run_kernel("softmax_backward", grad, y, rows, SCORES[-1], 0.125, element, out),
        ),
    }


FAMILIES = (dropout_pairs, norm_pairs, activation_pairs, softmax_pairs)


def native_kernels(
    only: Annotated[str, typer.Option(help="Only kernels whose names contain this.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 30,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write it.")] = None,
) -> None:
    """Times kernels and eager in turns, on PyTorch's threads."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("", "eager, ms", "kernel, ms", "times as fast"):
        table.add_column(heading, justify="right" if heading else "left")
    facts, found = machine.facts(torch.get_num_threads()), {}
    for dtype in (torch.float32, torch.bfloat16):
        pairs = {name: pair for family in FAMILIES for name, pair in family(dtype).items() if only in name}
        for name, (eager, kernel) in pairs.items():
            seconds = in_turns({"eager": eager, "kernel": kernel}, rounds, 3)
            theirs, ours = median(seconds["eager"]), median(seconds["kernel"])
            title = f"{name} {str(dtype).removeprefix('torch.')}"
            found[title] = {"eager": theirs, "kernel": ours, "ratio": theirs / ours}
            table.add_row(title, f"{1e3 * theirs:.3f}", f"{1e3 * ours:.3f}", f"{theirs / ours:.2f}")
    facts["load_after"] = machine.load()
    Console(width=None if Console().is_terminal else 120).print(table)
    print(machine.in_short(facts), f"load {facts['load_before']} to {facts['load_after']}")
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": facts, **found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(native_kernels)
