"""Whether operators of PyTorch give eager's results and gradients through the backend, sample by sample."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any, NoReturn

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from ort_accel.compiler.backend import Backend
from ort_accel.compiler.settings import resolve
from ort_accel.config import load_config
from ort_accel.reporting.report import Report
from ort_accel.reporting.segments import Runner

SEED = 1234
ROUNDING = 4
"""How many times farther from float64 than eager a result may be, where it is not within the default tolerance."""


class Verdict(StrEnum):
    """What became of an operator, worst last."""

    MATCH = "match"
    SAME_FAULT = "same fault as aot_eager"
    ERROR = "error"
    MISMATCH = "mismatch"


@dataclass
class Outcome:
    """One operator: the worst of its samples, and who ran its nodes."""

    name: str
    verdict: Verdict = Verdict.MATCH
    detail: str = ""
    samples: int = 0
    by_ort: Counter[str] = field(default_factory=Counter)
    by_pytorch: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    """Why PyTorch runs an ATen operator."""

    @property
    def share(self) -> float:
        """The share of nodes that ONNX Runtime ran, of those that compute something."""
        total = self.by_ort.total() + self.by_pytorch.total()
        return self.by_ort.total() / total if total else 1.0

    def add(self, verdict: Verdict, detail: str) -> None:
        """Take in one sample."""
        self.samples += 1
        if list(Verdict).index(verdict) > list(Verdict).index(self.verdict):
            self.verdict, self.detail = verdict, detail

    def count(self, report: Report) -> None:
        """Take in who ran what."""
        for segment in report.segments:
            (self.by_ort if segment.runner is Runner.ORT else self.by_pytorch).update(segment.ops)
        for item in report.fallbacks:
            self.reasons[item.op] = f"{item.reason}: {item.detail}" if item.detail else str(item.reason)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return {
            "name": self.name,
            "verdict": self.verdict.value,
            "detail": self.detail,
            "samples": self.samples,
            "share": self.share,
            "onnxruntime": dict(self.by_ort),
            "pytorch": {
                op: {"nodes": count, "reason": self.reasons.get(op, "")} for op, count in self.by_pytorch.items()
            },
        }


CPU = torch.device("cpu")


def operators(dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> list[OpInfo]:
    """Every operator of torch's own tests that has a gradient in a type."""
    return [op for op in op_db if op.supports_autograd and op.supports_dtype(dtype, device.type)]


def full_name(op: OpInfo) -> str:
    """The operator with its variant: `linalg.norm.subgradients_at_zero`."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def check(op: OpInfo, samples: int = 2, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Outcome:
    """Run the first samples of an operator through the backend and compare each with eager."""
    outcome = Outcome(full_name(op))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(SEED)
        drawn = list(islice(op.sample_inputs(str(device), dtype, requires_grad=True), samples))
        for sample in drawn:
            _check_sample(Case(op, sample), outcome)
    return outcome


class Case:
    """One sample as a function of its tensors that returns the tensors among its results."""

    def __init__(self, op: Callable[..., Any], sample: SampleInput) -> None:
        leaves, self._spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self._leaves, self._op, self._finish = leaves, op, sample.output_process_fn_grad
        self._places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = [leaves[index].detach() for index in self._places]
        self.device = next((tensor.device for tensor in self.tensors if tensor.is_cuda), CPU)
        self.wants_grad = [leaves[index].requires_grad for index in self._places]

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = list(self._leaves)
        for index, tensor in zip(self._places, tensors, strict=True):
            leaves[index] = tensor
        operand, args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        results = pytree.tree_leaves(self._finish(self._op(operand, *args, **kwargs)))
        return tuple(item for item in results if isinstance(item, torch.Tensor))

    def run(self, function: Callable[..., Any], dtype: torch.dtype | None = None) -> Iterator[torch.Tensor | None]:
        """The results and then the gradients, from a fixed seed."""
        inputs = [_copy(tensor, dtype) for tensor in self.tensors]
        for tensor, wants_grad in zip(inputs, self.wants_grad, strict=True):
            tensor.requires_grad_(wants_grad)
        torch.manual_seed(SEED)
        results = function(*inputs)
        yield from (result.detach() for result in results)
        differentiable = [result for result in results if result.requires_grad]
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        if differentiable and wanted:
            grads = [_direction(result) for result in differentiable]
            yield from torch.autograd.grad(differentiable, wanted, grads, allow_unused=True)


def _copy(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor of its own with the same strides."""
    copy = tensor.detach().clone()
    return copy.to(dtype) if dtype is not None and copy.dtype.is_floating_point else copy


def _direction(result: torch.Tensor) -> torch.Tensor:
    """The gradient that comes in from behind: the same numbers for every type."""
    generator = torch.Generator().manual_seed(SEED)
    if result.is_complex():
        return torch.randn(result.shape, generator=generator, dtype=torch.complex64).to(result)
    return torch.randn(result.shape, generator=generator).to(result)


def _check_sample(case: Case, outcome: Outcome) -> None:
    try:
        expected, again = list(case.run(case)), list(case.run(case))
    except Exception:  # not for eager either
        return
    if difference(again, expected):  # memory that was never written
        return
    report = Report()
    fault = _fault(case, _traced(case, ort_backend(report, case.device)), expected)
    if fault and _fault(case, _traced(case, _aot_eager), expected):  # what cannot be traced as a whole
        report = Report()
        fault = _fault(case, _compiled(case, ort_backend(report, case.device)), expected)
        if fault and _fault(case, _compiled(case, "aot_eager"), expected):
            fault = (Verdict.SAME_FAULT, fault[1])
    outcome.count(report)
    outcome.add(*fault or (Verdict.MATCH, ""))


def _fault(case: Case, function: Callable[..., Any], expected: list[Any]) -> tuple[Verdict, str] | None:
    """What goes wrong in two runs of a function; None if nothing does."""
    for _ in range(2):
        try:
            actual = list(case.run(function))
        except Exception as error:
            return Verdict.ERROR, f"{type(error).__name__}: {str(error)[:400]}"
        found = difference(actual, expected)
        if found and not _as_close_as_eager(case, actual, expected):
            return Verdict.MISMATCH, found
    return None


def difference(actual: list[Any], expected: list[Any]) -> str:
    """What differs in value, type, shape, NaN or infinity; nothing if the two agree."""
    try:
        torch.testing.assert_close(actual, expected, equal_nan=True)
    except (AssertionError, TypeError, ValueError, RuntimeError) as error:
        return " ".join(str(error).split())
    return ""


def _as_close_as_eager(case: Case, actual: list[Any], expected: list[Any]) -> bool:
    """Whether results that differ by rounding are about as near to the float64 results as eager's own."""
    try:
        exact = list(case.run(case, torch.float64))
    except Exception:
        return False
    return len(exact) == len(actual) and all(map(_near, actual, expected, exact))


def _near(actual: Any, expected: Any, exact: Any) -> bool:
    if actual is None or expected is None or actual.dtype != expected.dtype or actual.shape != expected.shape:
        return actual is expected
    if not actual.dtype.is_floating_point or exact.dtype != torch.float64:
        return not difference([actual], [expected])
    finite = expected.isfinite()
    if not torch.equal(actual.isfinite(), finite) or difference([actual[~finite]], [expected[~finite]]):
        return False
    error, allowed = (actual - exact)[finite].abs(), (expected - exact)[finite].abs()
    scale = torch.finfo(actual.dtype).eps * exact[finite].abs()
    return not error.numel() or bool((error <= ROUNDING * allowed.max() + 16 * scale.max()).all())


def ort_backend(report: Report, device: torch.device = CPU) -> Backend:
    """The backend, with ONNX Runtime made to run whatever has a lowering, and to fail aloud."""
    config = load_config({"version": 1, "engine": {"fallback": "report", "threads": 1}})
    backend = Backend(resolve(config, device, sees_steps=False), report)

    def fail(*what: Any) -> NoReturn:
        raise what[-1]

    backend.lowering.change(failed=fail, for_speed=False)
    backend.policy.not_compiled = fail  # type: ignore[method-assign]
    return backend


class _Module(torch.nn.Module):
    graph = torch.fx.Graph()
    """Empty, for passes that look at what Dynamo captures: here is a call, which AOTAutograd traces."""

    def __init__(self, case: Callable[..., Any]) -> None:
        super().__init__()
        self._case = case

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self._case(*tensors)


def _traced(case: Case, backend: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is traced as a whole at its first call, without Dynamo: ten times faster."""
    made: list[Callable[..., Any]] = []

    def call(*tensors: torch.Tensor) -> Any:
        if not made:
            with torch.random.fork_rng():
                made.append(backend(_Module(case), list(tensors)))
        return made[0](*tensors)

    return call


def _compiled(case: Case, backend: Any) -> Callable[..., Any]:
    """As Dynamo compiles it: what depends on data, or sets a seed, runs in Python between the graphs."""
    torch._dynamo.reset()
    return torch.compile(case, backend=backend)


def _as_it_is(module: torch.fx.GraphModule, _: Any) -> Any:
    return module


_aot_eager = aot_autograd(fw_compiler=_as_it_is)
