"""The native attention kernels beside PyTorch's attention, forward and backward. See `--help`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ort_accel.cli.benchmark import machine
from ort_accel.cli.benchmark.timing import compare, in_turns, summary
from ort_accel.native.attention import Attention, Masking, Span
from ort_accel.native.library import native_library

Step = Callable[[], Any]
KEEP = 0.9


@dataclass(frozen=True)
class Case:
    """Sequences of attention heads. Where tokens are padding, PyTorch computes them, and the native kernels do not."""

    length: int
    is_causal: bool = False
    density: float = 1.0
    """The share of tokens that are no padding."""
    drops: bool = False
    """Dropout, whose draws are given; PyTorch has no fused kernel for it."""
    dtype: str = "float32"
    batch: int = 8
    heads: int = 6
    key_heads: int = 6
    dim: int = 64

    @property
    def name(self) -> str:
        size = f"{self.batch}x{self.length}, {self.heads} heads of {self.dim}"
        grouped = f", {self.key_heads} of keys" if self.key_heads != self.heads else ""
        marks = {"causal": self.is_causal, "dropout": self.drops, self.dtype: self.dtype != "float32"}
        padded = f", {self.density:.0%} valid" if self.density < 1 else ""
        return size + grouped + "".join(f", {mark}" for mark, holds in marks.items() if holds) + padded

    def lengths(self) -> list[int]:
        """Returns the tokens of each sequence, from few to all, that make up the density."""
        if self.density == 1:
            return [self.length] * self.batch
        spread = torch.linspace(0.3, 1.7, self.batch) * self.density * self.length
        return spread.round().int().clamp(1, self.length).tolist()


CASES = [
    Case(128),
    Case(128, is_causal=True),
    Case(512),
    Case(512, is_causal=True),
    Case(128, drops=True),
    Case(128, density=0.35),
    Case(512, density=0.35),
    Case(512, is_causal=True, density=0.35),
    Case(256, is_causal=True, key_heads=2, batch=4),
    Case(128, dtype="bfloat16"),
    Case(512, is_causal=True, dtype="bfloat16"),
    Case(512, density=0.35, dtype="bfloat16"),
]


def measure(
    rounds: Annotated[int, typer.Option(min=2, help="Rounds that count.")] = 21,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of PyTorch; by default as it chooses.")] = None,
    only: Annotated[list[int] | None, typer.Option(help="Numbers of the cases, from 0 on; by default all.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures here.")] = None,
) -> None:
    """Measure attention, PyTorch's and the native kernels in turn in every round."""
    library = native_library()
    if library is None:
        raise typer.BadParameter("the native library was not built")
    library.ort_accel_attach()
    torch.set_num_threads(threads or torch.get_num_threads())
    facts = machine.facts(torch.get_num_threads())
    table = Table("attention", *(f"{way}, ms" for way in ("forward", "native", "backward", "native")), "times as fast")
    found = []
    for case in CASES if only is None else [CASES[number] for number in only]:
        found.append(_measured(case, rounds))
        table.add_row(case.name, *_figures(found[-1]))
    console = Console(width=120)
    console.print(f"{machine.in_short(facts)}; load {facts['load_before']} before, {machine.load()} after")
    console.print(table)
    if json_file is not None:
        facts["load_after"] = machine.load()
        json_file.write_text(json.dumps({"machine": facts, "cases": found}, indent=1) + "\n")


def _figures(measured: dict[str, Any]) -> Sequence[str]:
    seconds = measured["seconds"]
    times = [f"{1e3 * seconds[name]['median']:.2f}" for name in seconds]
    ratios = " and ".join(f"{measured['ratios'][way]['ratio']:.2f}" for way in ("forward", "backward"))
    return [*times, ratios]


def _measured(case: Case, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    steps = _steps(case)
    seconds = in_turns(steps, rounds, warmup=3)
    ratios = {way: compare(seconds[way], seconds[f"native {way}"]).to_dict() for way in ("forward", "backward")}
    return {
        "case": asdict(case),
        "seconds": {name: summary(values).to_dict() for name, values in seconds.items()},
        "ratios": ratios,
    }


def _steps(case: Case) -> dict[str, Step]:
    """Returns what is timed, after a check that both give the same results."""
    valid = torch.arange(case.length) < torch.tensor(case.lengths()).unsqueeze(1)
    heads = (case.heads, case.key_heads, case.key_heads, case.heads)
    dense = [
        torch.randn(case.batch, case.length, count, case.dim).to(getattr(torch, case.dtype)).transpose(1, 2)
        for count in heads
    ]
    kept = torch.rand(case.batch, case.heads, case.length, case.length) < KEEP if case.drops else None
    grad_out = dense[3] * valid[:, None, :, None]
    operands = [one.detach().requires_grad_() for one in dense[:3]]
    forward = _eager(case, operands, valid, kept)
    result = forward()
    rows = [one.transpose(1, 2)[valid] for one in (*dense[:3], grad_out)]
    kernels = _kernels(case, kept)
    out, logsumexp = kernels.forward(*rows[:3])
    grads = kernels.backward(rows[3], *rows[:3], out, logsumexp)
    expected = result, *torch.autograd.grad(result, operands, grad_out, retain_graph=True)
    tolerance = 1e-4 if case.dtype == "float32" else 5e-2
    for ours, theirs in zip((out, *grads), expected, strict=True):
        torch.testing.assert_close(ours, theirs.transpose(1, 2)[valid], rtol=tolerance, atol=tolerance)
    return {
        "forward": forward,
        "native forward": lambda: kernels.forward(*rows[:3]),
        "backward": lambda: torch.autograd.grad(result, operands, grad_out, retain_graph=True),
        "native backward": lambda: kernels.backward(rows[3], *rows[:3], out, logsumexp),
    }


def _eager(case: Case, operands: Sequence[Tensor], valid: Tensor, kept: Tensor | None) -> Callable[[], Tensor]:
    """Returns PyTorch's forward. Masks are as Hugging Face's models make them, causal ones only without padding."""
    mask = valid[:, None, None, :].expand(-1, 1, case.length, -1).contiguous() if case.density < 1 else None
    if mask is not None and case.is_causal:
        mask = mask & torch.ones(case.length, case.length, dtype=torch.bool).tril()
    is_causal = case.is_causal and mask is None
    if kept is None:
        grouped = case.heads != case.key_heads
        return lambda: scaled_dot_product_attention(*operands, mask, is_causal=is_causal, enable_gqa=grouped)
    math = torch.ops.aten._scaled_dot_product_attention_math
    return lambda: math(*operands, mask, 1 - KEEP, is_causal, kept)[0]


def _kernels(case: Case, kept: Tensor | None) -> Attention:
    spans, end, size = [], 0, case.heads * case.length**2
    for number, length in enumerate(case.lengths()):
        begin, end = end, end + length
        masking = Masking.CAUSAL if case.is_causal else Masking.FULL
        spans.append(Span(begin, end, begin, end, masking, kept_begin=number * size))
    if kept is None:
        return Attention(spans, case.dim**-0.5)
    bits = (kept.view(-1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)
    strides = case.length**2, case.length
    return Attention(spans, case.dim**-0.5, kept=bits, kept_strides=strides, keep=KEEP)


if __name__ == "__main__":
    typer.run(measure)
