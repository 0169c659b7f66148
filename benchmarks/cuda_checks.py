"""The checks of `benchmarks/on_cuda.py`. Each compares with eager PyTorch on the same device, or measures.

`checks` lists them, the most telling first, so that a run that ends early has told most.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import ort_accel
from benchmarks.cuda_bench import DTYPES, FP32, HALF, Bench, Finding, Options, accelerated, peak_of_steps
from benchmarks.cuda_offload import check_offload
from benchmarks.op_parity import Verdict, check, full_name, operators
from ort_accel.cli.benchmark.contenders import EAGER, INDUCTOR, ORT_ACCEL, distances
from ort_accel.cli.benchmark.timing import compare, in_turns, summary
from ort_accel.cli.benchmark.workload import Workload
from ort_accel.runtime.installed_ort import installed_runtime

# fmt: off
OPERATORS = frozenset([
    "nn.functional.linear", "nn.functional.layer_norm", "nn.functional.gelu", "nn.functional.silu",
    "nn.functional.softplus", "nn.functional.cross_entropy", "nn.functional.embedding", "nn.functional.conv2d",
    "nn.functional.batch_norm", "nn.functional.group_norm", "nn.functional.scaled_dot_product_attention", "softmax",
    "log_softmax", "matmul", "bmm", "addmm", "mm", "add", "mul", "div", "sub", "pow", "exp", "erf", "tanh",
    "sigmoid", "rsqrt", "where", "masked_fill", "gather", "index_select", "index_add", "scatter_add", "cumsum",
    "cat", "stack", "split", "expand", "transpose", "permute", "sum", "mean", "var", "amax", "max", "clamp", "norm",
    "triu", "repeat",
])
# fmt: on
"""Those of torch's own tests that models are made of."""

KERNELS_LISTED = 30
"""The kernels of a profiled step that are written down, the longest first."""

DEFAULT = "ort_accel, as it comes"
STEPS_TO_DECIDE = 24
"""Steps in which ort_accel finds out whether the engine or eager PyTorch is faster."""


@dataclass(frozen=True)
class Check:
    """One entry of the list: its name, and the work that adds to a bench's findings, figures or times."""

    name: str
    run: Callable[[Bench], None]
    on_cuda_only: bool = False


def checks(bench: Bench) -> list[Check]:
    """All checks for a device, the most telling first."""
    large = {"batch": 64, "length": 512}
    every = [
        Check("the provider", check_provider, on_cuda_only=True),
        *model_checks(bench, [("bert", "fp32"), ("bert", "bf16")]),
        *option_checks(bench),
        timing(bench.workload("bert", **large), "bf16", with_default=True),
        timing(bench.workload("bert", density=0.4, **large), "bf16"),
        *model_checks(bench, [(model, "bf16") for model in ("llama", "gpt2", "t5", "bert-mlm", "vit")]),
        timing(bench.workload("llama"), "bf16"),
        *sharing_checks(bench),
        *operator_checks("fp32"),
        Check("values in host memory", check_offload),
        timing(bench.workload("bert"), "bf16"),
        *operator_checks("bf16"),
        *model_checks(bench, [(model, "fp32") for model in ("llama", "gpt2", "t5", "bert-mlm", "vit")]),
        *model_checks(bench, [(model, "fp16") for model in ("bert", "llama", "gpt2", "t5", "bert-mlm", "vit")]),
        *operator_checks("fp16"),
        timing(bench.workload("bert"), "fp32"),
        timing(bench.workload("bert"), "fp16"),
        timing(bench.workload("bert", dropout=0.1), "bf16"),
    ]
    wanted = [each for each in every if bench.is_cuda or not each.on_cuda_only]
    first_time = next(each.name for each in wanted if each.name.startswith("time of"))
    return [each for each in wanted if not bench.tiny or each.name in {*TRIED_WHEN_TINY, first_time}]


TRIED_WHEN_TINY = {"bert, fp32", "bert, bf16", "bert, padded, fp32", "llama, padded, bf16", "operator add, fp32"}


def timing(workload: Workload, precision: str, *, with_default: bool = False) -> Check:
    """One check that times a step."""
    name = f"time of {dataclasses.replace(workload, precision=precision)}"
    return Check(name, lambda bench: measure(bench, workload, precision, with_default=with_default))


def check_provider(bench: Bench) -> None:
    """Does ONNX Runtime's CUDA provider load, and does it run a product?"""
    runtime = installed_runtime()
    bench.figures["providers"] = ", ".join(runtime.providers)

    def look() -> str:
        model = nn.Linear(64, 64).to(bench.device)
        values = torch.randn(8, 64, device=bench.device)
        ours = accelerated(model, engine={"fallback": "error"})
        found = (ours(values).float() - model(values)).abs().max()
        return "" if found < 1e-4 else f"a product is off by {found:.2g}"

    bench.looked("the provider", look)


def operator_checks(precision: str) -> list[Check]:
    """One check for each operator of `OPERATORS`."""

    def one(name: str) -> Check:
        return Check(f"operator {name}, {precision}", lambda bench: check_operator(bench, name, precision))

    return [one(name) for name in sorted(OPERATORS)]


def check_operator(bench: Bench, name: str, precision: str) -> None:
    """Compare an operator's results and gradients with eager's, on up to three samples."""
    dtype = DTYPES[precision]
    for op in operators(dtype, bench.device):
        if full_name(op) != name:
            continue
        begin = time.perf_counter()
        outcome = check(op, 1 if bench.tiny else 3, dtype, bench.device)
        is_right = outcome.verdict not in {Verdict.ERROR, Verdict.MISMATCH}
        detail = f"{outcome.share:.0%} by ONNX Runtime {outcome.detail}".strip()
        seconds = round(time.perf_counter() - begin, 2)
        bench.findings.append(Finding(f"operator {name}, {precision}", is_right, detail, seconds))


def fault_of(bench: Bench, workload: Workload, precision: str, **options: Options) -> str:
    """Return how a model's step differs from eager's; empty if its loss and gradients are eager's."""
    model, batch = bench.model(workload)
    exact = bench.step(model, batch)
    allowed = (
        FP32 if precision == "fp32" else HALF * max(distances(bench.step(model, batch, precision), exact).values())
    )
    ours = accelerated(model, **options)
    for _ in range(2):
        found = distances(bench.step(ours, batch, precision), exact)
        worst = max(found, key=found.__getitem__)
        if not found[worst] <= allowed:
            return f"{worst} is off by {found[worst]:.2g} of its length, {allowed:.2g} is allowed"
    failed = [item.detail for item in ort_accel.report(ours).fallbacks if item.reason.value == "failed in ONNX Runtime"]
    return f"PyTorch took over: {failed[0]}" if failed else ""


def model_checks(bench: Bench, wanted: list[tuple[str, str]]) -> list[Check]:
    """One check for each model and precision: loss and gradients of two layers."""

    def one(model: str, precision: str) -> Check:
        size = bench.workload(model, layers=2)
        name = f"{model}, {precision}"
        return Check(name, lambda bench: bench.looked(name, lambda: fault_of(bench, size, precision)))

    return [one(model, precision) for model, precision in wanted]


def option_checks(bench: Bench) -> list[Check]:
    """A model with padding, with dropout, and with attention written as products."""
    size = bench.workload("bert", layers=2)
    half = bench.workload("bert", layers=2, density=0.4)
    left_out: Options = {"density": {"padding": True}}
    cases: dict[str, tuple[Workload, str, Options]] = {
        "bert, padded, fp32": (half, "fp32", left_out),
        "bert, padded, bf16": (half, "bf16", left_out),
        "llama, padded, bf16": (bench.workload("llama", layers=2, density=0.5, labelled=0.3), "bf16", left_out),
        "bert, with dropout, fp32": (bench.workload("bert", layers=2, dropout=0.2), "fp32", {}),
        "bert, attention as products, fp32": (size, "fp32", {"compute": {"attention": "products"}}),
        "bert, memory.level 1, fp32": (size, "fp32", {"memory": {"level": 1}}),
    }

    def one(name: str) -> Check:
        workload, precision, options = cases[name]
        return Check(name, lambda bench: bench.looked(name, lambda: fault_of(bench, workload, precision, **options)))

    return [one(name) for name in cases]


def sharing_checks(bench: Bench) -> list[Check]:
    """Streams and memory, which only a CUDA device has."""
    size = bench.workload("bert", layers=2)

    def on_another_stream(bench: Bench) -> str:
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            fault = fault_of(bench, size, "fp32")
        torch.cuda.synchronize()
        return fault

    looks: dict[str, Callable[[Bench], str]] = {
        "another stream": on_another_stream,
        "memory is PyTorch's": lambda bench: _is_pytorchs(bench, size),
        "memory.external_allocator true": lambda bench: fault_of(
            bench, size, "fp32", memory={"external_allocator": True}
        ),
        "memory.external_allocator false": lambda bench: fault_of(
            bench, size, "fp32", memory={"external_allocator": False}
        ),
        "memory of steps with changing lengths": lambda bench: growth(bench, size),
    }

    def one(name: str) -> Check:
        return Check(name, lambda bench: bench.looked(name, lambda: looks[name](bench)), on_cuda_only=True)

    return [one(name) for name in looks]


def growth(bench: Bench, size: Workload) -> str:
    """Return a fault if memory grows over 100 steps, or if a new length compiles anything."""
    model, batch = bench.model(size)
    ours = accelerated(model)
    lengths = [size.length - 1 - step % 10 for step in range(120)]
    held: list[int] = []
    for step, length in enumerate([size.length, *lengths]):
        bench.step(ours, {name: item[:, :length] if item.ndim == 2 else item for name, item in batch.items()})
        if step in (20, 120):
            free, total = torch.cuda.mem_get_info()
            held.append(total - free)
        if step == 2:
            compiled = ort_accel.report(ours).counters["compilations"]
    more = held[1] - held[0]
    if more > 64 << 20:
        return f"{more / 2**20:.0f} MiB more after 100 steps"
    again = ort_accel.report(ours).counters["compilations"] - compiled
    return f"{again} graphs were compiled for other lengths" if again else ""


def _is_pytorchs(bench: Bench, size: Workload) -> str:
    """Return a fault if PyTorch does not count ONNX Runtime's memory: the peak is then far below eager's."""
    model, batch = bench.model(size)
    peaks = []
    for one in (model, accelerated(model, memory={"external_allocator": True})):
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            bench.step(one, batch)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    return "" if peaks[1] > peaks[0] / 4 else f"PyTorch counts {peaks[1]:,} bytes, {peaks[0]:,} in eager mode"


def measure(bench: Bench, workload: Workload, precision: str, *, with_default: bool = False) -> None:
    """Time forward and backward in eager PyTorch, in Inductor and on the engine, in turns, and profile one step each.

    `with_default` adds ort_accel as it comes, which runs what it finds faster, the engine or eager PyTorch.
    """
    model, batch = bench.model(workload)
    compiled = copy.deepcopy(model)
    compiled.compile()
    models = {EAGER: model, INDUCTOR: compiled, ORT_ACCEL: accelerated(model)}
    if with_default:
        models[DEFAULT] = accelerated(model, engine={"compare_with_eager": "auto"})

    def run(one: nn.Module) -> None:
        one.zero_grad(set_to_none=True)
        with bench.autocast(precision):
            loss = one(**batch).loss
        loss.backward()
        bench.settle()

    first = in_turns({name: lambda one=one: run(one) for name, one in models.items()}, 1, warmup=0)
    if with_default:
        for _ in range(STEPS_TO_DECIDE):
            run(models[DEFAULT])
    seconds = in_turns({name: lambda one=one: run(one) for name, one in models.items()}, bench.rounds, warmup=2)
    others = {name: values for name, values in seconds.items() if name != ORT_ACCEL}
    bench.times.append(
        {
            "workload": str(dataclasses.replace(workload, precision=precision)),
            "first_step": {name: values[0] for name, values in first.items()},
            "seconds": {name: summary(values).to_dict() for name, values in seconds.items()},
            "ratios": {name: compare(values, seconds[ORT_ACCEL]).to_dict() for name, values in others.items()},
            "peak_bytes": {name: peak_of_steps(bench, one, batch)[1] for name, one in models.items()},
            "profiles": {name: profiled(bench, lambda one=one: run(one)) for name, one in models.items()},
            "report": ort_accel.report(models[ORT_ACCEL]).to_dict(),
        }
    )


def profiled(bench: Bench, step: Callable[[], None]) -> dict[str, Any]:
    """The kernels of one step with their times, and how long the device was busy."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.is_cuda else [])]
    with profile(activities=activities) as found:
        step()
    device = bench.device.type
    rows = [
        (event.key, event.count, getattr(event, f"self_{'device' if bench.is_cuda else 'cpu'}_time_total"))
        for event in found.key_averages()
        if not bench.is_cuda or "cuda" in str(event.device_type).lower()
    ]
    rows.sort(key=lambda row: -row[2])
    return {
        "device": device,
        "busy_us": round(sum(row[2] for row in rows)),
        "launches": sum(row[1] for row in rows),
        "kernels": [
            {"name": name[:160], "count": count, "us": round(spent)} for name, count, spent in rows[:KERNELS_LISTED]
        ],
    }
