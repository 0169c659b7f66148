"""In half precision what PyTorch computes in single precision, and rounds once, comes out as in eager mode."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ort_accel
from benchmarks.op_parity import Verdict, check, full_name, operators, ort_backend
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.report import Report
from tests.lowering.through_ort import Lowered

HALVES = [torch.float16, torch.bfloat16]
ROUNDING = 2 * torch.finfo(torch.bfloat16).eps
NORMS = ["batch_norm", "instance_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"]
OPERATORS = [
    (op, dtype) for dtype in HALVES for op in operators(dtype) if op.name.split(".")[-1] in [*NORMS, "soft_margin_loss"]
]


@pytest.mark.parametrize(("op", "dtype"), OPERATORS, ids=lambda item: full_name(item) if hasattr(item, "name") else "")
def test_an_operator_with_statistics_or_overflow_equals_eager(op, dtype):
    outcome = check(op, dtype=dtype)
    assert outcome.verdict is Verdict.MATCH, outcome.detail


def steps(model, batches):
    """Gradients of each step, and the statistics after all of them."""
    found = []
    for batch in batches:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = model(batch)
        value.float().pow(2).sum().backward()
        found += [value.detach(), *(item.grad for item in model.parameters() if item.requires_grad)]
    return [*found, *(buffer for buffer in model.buffers())]


def test_batch_norm_keeps_its_statistics_in_single_precision_under_autocast():
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh())
    report = Report()
    ours = torch.compile(copy.deepcopy(eager), backend=ort_backend(report))
    batches = [torch.randn(size, 6) for size in (4, 9)]
    torch.testing.assert_close(steps(ours, batches), steps(eager, batches), rtol=ROUNDING, atol=ROUNDING)
    assert not [item for item in report.fallbacks if "batch_norm" in item.op]


def test_large_batches_are_normalized_by_pytorch_which_is_faster_in_half_precision():
    model = ort_accel.accelerate(nn.BatchNorm1d(64).bfloat16())
    model(torch.randn(1024, 64).bfloat16().requires_grad_()).sum().backward()
    slower = {item.op for item in ort_accel.report(model).fallbacks if item.reason is Reason.SLOWER_ELSEWHERE}
    assert slower == {"aten._native_batch_norm_legit_functional.default", "aten.native_batch_norm_backward.default"}


def test_gradients_that_nobody_wants_do_not_keep_the_others_from_onnxruntime():
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4))
    eager[1].requires_grad_(False)
    ours = ort_accel.accelerate(copy.deepcopy(eager))
    given = torch.randn(3, 6)
    for model in (eager, ours):
        model(given).sum().backward()
    torch.testing.assert_close(ours[0].weight.grad, eager[0].weight.grad)
    assert ort_accel.report(ours).fallbacks == []


@pytest.mark.parametrize("function", [torch.logaddexp, torch.maximum, torch.fmin, torch.clamp_max])
def test_the_larger_of_two_float16_tensors_of_different_shapes(function):
    """Kernels of onnxruntime-training 1.19.2 for it write past the end of their results, which ended the process."""
    torch.manual_seed(0)
    column, row = torch.randn(40, 1).half(), torch.randn(1, 30).half()
    lowered = Lowered(function, (column, row))
    assert lowered.refusals == {}
    results = [lowered(column, row)[0] for _ in range(100)]
    torch.testing.assert_close(results[-1], function(column, row))
    assert all(torch.equal(result, results[-1]) for result in results)


LARGE_NORMS = {
    "layer_norm": lambda x: nn.functional.layer_norm(x, [8]),
    "group_norm": lambda x: nn.functional.group_norm(x, 2),
    "rms_norm": lambda x: nn.functional.rms_norm(x, [8]),
    "normalize": lambda x: nn.functional.normalize(x, dim=-1),
    "std": lambda x: x.std(-1),
    "var_mean": lambda x: torch.var_mean(x / 64, -1),
    "norm": lambda x: torch.linalg.vector_norm(x, 3, -1),
}


@pytest.mark.parametrize("name", LARGE_NORMS)
def test_squares_do_not_overflow(name):
    torch.manual_seed(0)
    x = (torch.randn(3, 4, 8) * 900).half().requires_grad_()
    eager = LARGE_NORMS[name](x)
    results = eager if isinstance(eager, tuple) else (eager,)
    assert all(result.isfinite().all() for result in results)
    ours = Lowered(LARGE_NORMS[name], [x.detach()])(x.detach())
    torch.testing.assert_close(ours, [result.detach() for result in results], rtol=4e-3, atol=4e-3)
