"""Everything about CUDA devices that only a machine with one can tell: `python benchmarks/on_cuda.py`.

Operators, loss and gradients of whole models, dropout masks, streams and memory are compared with eager PyTorch on the
same device, and values are moved to host memory and back; then a step is timed in eager PyTorch, in Inductor and on
ort_accel, in turns. All of it is written as JSON into `benchmarks/results/`. The exit code is 1 if anything differs.
`--device cpu --tiny` tries the script itself.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import ort_accel
from benchmarks.op_parity import Verdict, check, full_name, operators
from ort_accel.cli.benchmark import machine
from ort_accel.cli.benchmark.contenders import EAGER, INDUCTOR, ORT_ACCEL, Trace, distances
from ort_accel.cli.benchmark.timing import compare, in_turns, summary
from ort_accel.cli.benchmark.workload import Batch, Workload, batch_of, build
from ort_accel.recompute import optimizer
from ort_accel.recompute.budget import Chosen
from ort_accel.recompute.cost import FLOPS_PER_MS
from ort_accel.recompute.transfers import LINK_BYTES_PER_MS

RESULTS = Path(__file__).parent / "results"

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

FP32, HALF = 1e-4, 3.0
"""How far a gradient may be from eager's, as a share of its length; in 16 bits, how many times eager's own distance."""

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

Options = Mapping[str, Any]


@dataclass
class Finding:
    """One thing that was looked at."""

    name: str
    is_right: bool
    detail: str = ""


@dataclass
class Bench:
    """A device, and sizes that suit it."""

    device: torch.device
    tiny: bool
    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)
    """What was measured on the way."""

    def workload(self, model: str, **sizes: Any) -> Workload:
        """A model of the size that is measured."""
        small = {"hidden": 32, "layers": 2, "heads": 2, "batch": 2, "length": 12, "vocab": 100}
        large = {"hidden": 768, "layers": 12, "heads": 12, "batch": 16, "length": 256, "vocab": 30522}
        return Workload(model=model, **({**(small if self.tiny else large), **sizes}))

    def model(self, workload: Workload) -> tuple[nn.Module, Batch]:
        """The model of a workload and its batch, on the device."""
        batch = {name: item.to(self.device) for name, item in batch_of(workload).items()}
        return build(workload).to(self.device), batch

    def step(self, model: nn.Module, batch: Batch, precision: str = "fp32") -> Trace:
        """One step from a fixed seed, and what it gave."""
        torch.manual_seed(0)
        model.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, DTYPES[precision], enabled=precision != "fp32"):
            loss = model(**batch).loss
        loss.backward()
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        return Trace(float(loss.detach()), {name: grad.clone() for name, grad in found.items() if grad is not None})

    def looked(self, name: str, look: Callable[[], str]) -> None:
        """Note what was found; whatever is raised is a finding, too."""
        try:
            fault = look()
        except Exception as error:
            fault = f"{type(error).__name__}: {str(error)[:400]}"
        self.findings.append(Finding(name, not fault, fault))


def accelerated(model: nn.Module, **options: Options) -> nn.Module:
    """A copy of a model on ONNX Runtime. A segment that fails is an error, not a rerun in PyTorch."""
    config = {"version": 1, "observe": {"log_level": "error"}, **options}
    return ort_accel.accelerate(copy.deepcopy(model), config)


def check_operators(bench: Bench, precision: str) -> None:
    """Each operator's results and gradients, on all samples."""
    dtype = DTYPES[precision]
    chosen = [op for op in operators(dtype, bench.device) if full_name(op) in OPERATORS]
    for op in chosen[:4] if bench.tiny else chosen:
        outcome = check(op, 1 if bench.tiny else 3, dtype, bench.device)
        is_right = outcome.verdict not in {Verdict.ERROR, Verdict.MISMATCH}
        detail = f"{outcome.share:.0%} by ONNX Runtime {outcome.detail}".strip()
        bench.findings.append(Finding(f"{precision} {outcome.name}", is_right, detail))


def fault_of(bench: Bench, workload: Workload, precision: str, **options: Options) -> str:
    """What is wrong with the step of a model; empty if its loss and gradients are eager's."""
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


def check_models(bench: Bench) -> None:
    """Loss and gradients of whole models."""
    for model in ["bert"] if bench.tiny else ["bert", "bert-mlm", "gpt2", "llama", "t5", "vit"]:
        for precision in DTYPES if bench.device.type == "cuda" else ("fp32", "bf16"):
            size = bench.workload(model, layers=2)
            bench.looked(f"{model}, {precision}", lambda s=size, p=precision: fault_of(bench, s, p))
    padded = bench.workload("bert", layers=2, density=0.4)
    bench.looked("bert, padded", lambda: fault_of(bench, padded, "fp32", density={"padding": True}))
    dropped = bench.workload("bert", layers=2, dropout=0.2)
    bench.looked("bert, with dropout", lambda: fault_of(bench, dropped, "fp32"))
    products = {"compute": {"attention": "products"}}
    bench.looked(
        "bert, attention as products", lambda: fault_of(bench, bench.workload("bert", layers=2), "fp32", **products)
    )


def check_sharing(bench: Bench) -> None:
    """Streams and memory, which only a CUDA device has."""
    size = bench.workload("bert", layers=2)
    for wish in (True, False):
        options = {"memory": {"external_allocator": wish}}
        bench.looked(f"external_allocator {wish}", lambda o=options: fault_of(bench, size, "fp32", **o))

    def on_another_stream() -> str:
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            fault = fault_of(bench, size, "fp32")
        torch.cuda.synchronize()
        return fault

    bench.looked("another stream", on_another_stream)
    bench.looked("memory of steps with changing lengths", lambda: growth(bench, size))
    bench.looked("memory is PyTorch's", lambda: _is_pytorchs(bench, size))


def growth(bench: Bench, size: Workload) -> str:
    """What the device holds more after many steps than after some; no length compiles anything."""
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
    """Whether PyTorch counts what ONNX Runtime takes: the peak of a step is near eager's, not far below it."""
    model, batch = bench.model(size)
    peaks = []
    for one in (model, accelerated(model, memory={"external_allocator": True})):
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            bench.step(one, batch)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    return "" if peaks[1] > peaks[0] / 4 else f"PyTorch counts {peaks[1]:,} bytes, {peaks[0]:,} in eager mode"


def check_offload(bench: Bench) -> None:
    """Values that lie in host memory meanwhile: all of them, and those that a budget chooses."""
    size = bench.workload("bert", dropout=0.1)
    with everything_moved():
        bench.looked("memory.offload, all that can be", lambda: offload_fault(bench, size, "1TiB"))
    bench.looked("memory.offload, for a budget", lambda: offload_fault(bench, size, 0.7))
    if bench.device.type == "cuda":
        copies, products = rates(bench.device)
        assumed = f"{FLOPS_PER_MS / LINK_BYTES_PER_MS:,.0f} assumed"
        ratio = f"{products / copies:,.0f} operations in the time of a byte, {assumed}"
        bench.figures["link to the host"] = f"{copies / 1e9:.1f} GB/s; {products / 1e12:.1f} TFLOP/s in bf16: {ratio}"


@contextmanager
def everything_moved() -> Iterator[None]:
    """While this is entered, a budget moves all values that can be, and computes none again."""
    within, movable = optimizer.within, optimizer.Movable
    names: list[str] = []

    class Noted(movable):
        def __init__(self, *how: Any) -> None:
            super().__init__(*how)
            names[:] = self.values

    def all_of_them(_: Any, sequences: Any) -> Any:
        first = next(sequences[0])
        return [first, dataclasses.replace(first, chosen=Chosen(moved=frozenset(names)))]

    optimizer.within, optimizer.Movable = all_of_them, Noted
    try:
        yield
    finally:
        optimizer.within, optimizer.Movable = within, movable


def offload_fault(bench: Bench, size: Workload, budget: str | float) -> str:
    """What is wrong with a step that moves values: its loss and gradients are to be those without, to the bit where
    the same step gives the same bits twice, and its peak is to be lower."""
    model, batch = bench.model(size)
    plain = accelerated(model, memory={"level": 0})
    ours = accelerated(model, memory={"budget": budget, "offload": True})
    (first, again), before = peak_of_steps(bench, plain, batch)
    (_, found), after = peak_of_steps(bench, ours, batch)
    memory = list(ort_accel.report(ours).memory.values())[-1]
    figures = (
        f"{memory.moved / 2**20:,.1f} MiB moved; peak of a step {before / 2**20:,.1f} MiB, then {after / 2**20:,.1f}"
    )
    foreseen = f"{memory.frontier[0].bytes / 2**20:,.1f}, then {memory.frontier[-1].bytes / 2**20:,.1f}"
    bench.figures[f"memory.offload, budget {budget}"] = f"{figures}; as foreseen {foreseen}"
    repeated = [name for name, each in first.gradients.items() if torch.equal(each, again.gradients[name])]
    differing = [name for name in repeated if not torch.equal(found.gradients[name], first.gradients[name])]
    if found.loss != first.loss or differing:
        return f"loss {found.loss} where it was {first.loss}, other bits in {', '.join(differing) or 'no gradient'}"
    far = {name: share for name, share in distances(found, first).items() if not share <= FP32}
    if far:
        return f"off by a share of its length: {far}"
    return "" if after < before or bench.device.type != "cuda" else f"the peak did not fall: {figures}"


def peak_of_steps(bench: Bench, model: nn.Module, batch: Batch) -> tuple[tuple[Trace, Trace], int]:
    """Two steps, and the most bytes of the device that the second one takes."""
    one = bench.step(model, batch)
    if bench.device.type != "cuda":
        return (one, bench.step(model, batch)), 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    other = bench.step(model, batch)
    return (one, other), torch.cuda.max_memory_allocated() - before


def rates(device: torch.device) -> tuple[float, float]:
    """Bytes a second from the device into pinned memory, and operations a second of a large product in bf16."""
    value, factor = (
        torch.empty(2**28, dtype=torch.uint8, device=device),
        torch.ones(8192, 8192, device=device).bfloat16(),
    )
    pinned = torch.empty_like(value, device="cpu", pin_memory=True)

    def seconds(work: Callable[[], Any]) -> float:
        work()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(4):
            work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 4e3

    copied = seconds(lambda: pinned.copy_(value, non_blocking=True))
    return value.nbytes / copied, 2 * factor.shape[0] ** 3 / seconds(lambda: factor @ factor)


def measured(bench: Bench, precision: str, rounds: int) -> dict[str, Any]:
    """Times of a step: forward and backward."""
    workload = bench.workload("bert")
    model, batch = bench.model(workload)
    compiled = copy.deepcopy(model)
    compiled.compile()
    models = {EAGER: model, INDUCTOR: compiled, ORT_ACCEL: accelerated(model)}
    settle = torch.cuda.synchronize if bench.device.type == "cuda" else lambda: None

    def run(one: nn.Module) -> None:
        one.zero_grad(set_to_none=True)
        with torch.autocast(bench.device.type, DTYPES[precision], enabled=precision != "fp32"):
            loss = one(**batch).loss
        loss.backward()
        settle()

    seconds = in_turns({name: lambda one=one: run(one) for name, one in models.items()}, rounds, warmup=3)
    others = {name: values for name, values in seconds.items() if name != ORT_ACCEL}
    return {
        "workload": str(dataclasses.replace(workload, precision=precision)),
        "seconds": {name: summary(values).to_dict() for name, values in seconds.items()},
        "ratios": {name: compare(values, seconds[ORT_ACCEL]).to_dict() for name, values in others.items()},
        "report": ort_accel.report(models[ORT_ACCEL]).to_dict(),
    }


def facts(device: torch.device) -> dict[str, Any]:
    """The device and what drives it."""
    found = machine.facts(torch.get_num_threads())
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        found |= {"device": torch.cuda.get_device_name(device), "memory": memory, "cuda": torch.version.cuda}
    return found


def tables(bench: Bench, times: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """What was found, for people."""
    wrong = [finding for finding in bench.findings if not finding.is_right]
    right = len(bench.findings) - len(wrong)
    table = Table("what differs from eager", "how", title=f"{right} of {len(bench.findings)} are eager's")
    for finding in wrong:
        table.add_row(finding.name, finding.detail)
    yield table
    if bench.figures:
        table = Table("measured", "")
        for name, text in bench.figures.items():
            table.add_row(name, text)
        yield table
    for measurement in times:
        table = Table("contender", "median ms", "times ort_accel's", title=measurement["workload"])
        for name, seconds in measurement["seconds"].items():
            ratio = measurement["ratios"].get(name)
            table.add_row(name, f"{1e3 * seconds['median']:.2f}", f"{ratio['ratio']:.2f}" if ratio else "1")
        yield table


def main(arguments: Sequence[str] | None = None) -> int:
    """Look at everything; 0 if all is eager's."""
    options = _options(arguments)
    device = torch.device(options.device, 0 if options.device == "cuda" else None)
    bench = Bench(device, options.tiny)
    is_cuda = device.type == "cuda"
    with torch.cuda.device(device) if is_cuda else nullcontext():
        for precision in DTYPES if is_cuda else ["fp32"]:
            check_operators(bench, precision)
        check_models(bench)
        if is_cuda:
            check_sharing(bench)
            check_offload(bench)
        times = [measured(bench, precision, options.rounds) for precision in DTYPES] if options.rounds else []
    record = {
        "machine": facts(device),
        "findings": [dataclasses.asdict(finding) for finding in bench.findings],
        "figures": bench.figures,
        "times": times,
    }
    path = options.json or RESULTS / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{device.type}.json"
    path.write_text(json.dumps(record, indent=1))
    console = Console(width=140)
    console.print(*tables(bench, times))
    console.print(f"written to {path}")
    return int(not all(finding.is_right for finding in bench.findings))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=30, help="rounds that are timed; 0 times nothing")
    parser.add_argument("--tiny", action="store_true", help="small models and few operators: tries the script")
    parser.add_argument("--json", type=Path, help="file to write, in place of one in benchmarks/results/")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
