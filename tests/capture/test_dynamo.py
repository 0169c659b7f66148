"""Dynamo is set up for training, and where it leaves code to Python is said."""

import json
import logging

import pytest
import torch
import transformers
from torch import nn

import ort_accel
from ort_accel.capture.dynamo import capturing
from ort_accel.compiler.backend import FIXED_SIZES, registered
from ort_accel.reporting.fallbacks import Reason
from tests.against_eager import assert_same, assert_step_as_eager, compilations, pair, report, step


class Branching(nn.Module):
    """Looks at a number before it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x)
        return y * 2 if y.sum() > 0 else y - 1


def test_dynamo_can_log_its_settings():
    """As torch 2.11 does for every compilation: sets are sorted, and all of it is written as JSON."""
    transformers.utils.logging.get_logger()
    with capturing():
        assert torch._dynamo.config.ignore_logging_functions
        settings = torch._dynamo.config.get_config_copy()["ignore_logging_functions"]
    assert json.dumps(sorted(settings)) == "[]"


def breaks(model):
    return [item for item in report(model).fallbacks if item.reason is Reason.GRAPH_BREAK]


def test_a_graph_break_is_in_the_report_with_the_line_that_caused_it():
    eager, ours = pair(Branching())
    assert_step_as_eager(eager, ours, torch.randn(3, 6))
    (found,) = breaks(ours)
    assert "Data-dependent branching" in found.detail


def test_a_graph_break_is_an_error_where_nothing_may_fall_back():
    ours = ort_accel.accelerate(Branching(), {"engine": {"fallback": "error"}})
    with pytest.raises(ort_accel.OrtAccelError, match="Data-dependent branching"):
        ours(torch.randn(3, 6))


def test_a_model_without_graph_breaks_reports_none():
    eager, ours = pair(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    for rows in (3, 4):
        assert_step_as_eager(eager, ours, torch.randn(rows, 6))
    assert not breaks(ours)


def test_breaks_of_another_model_are_not_reported():
    other = ort_accel.accelerate(Branching())
    other(torch.randn(3, 6))
    eager, ours = pair(nn.Linear(6, 6))
    assert_step_as_eager(eager, ours, torch.randn(3, 6))
    assert not breaks(ours)


def test_what_transformers_says_once_does_not_break_the_graph():
    pytest.importorskip("transformers")
    logger = logging.getLogger("transformers.testing")

    class Talking(nn.Linear):
        def forward(self, x):
            logger.warning_once("the default is used")
            return super().forward(x)

    eager, ours = pair(Talking(6, 6))
    assert_step_as_eager(eager, ours, torch.randn(3, 6))
    assert not breaks(ours)
    assert compilations(ours) == 2


def test_a_batch_as_wide_as_it_is_long_is_no_special_case():
    eager, ours = pair(nn.Linear(6, 6))
    for shape in ((8, 8, 6), (9, 9, 6)):
        assert_step_as_eager(eager, ours, torch.randn(shape))
    before = compilations(ours)
    assert_step_as_eager(eager, ours, torch.randn(4, 7, 6))
    assert compilations(ours) == before


def test_settings_of_dynamo_are_as_before_outside_of_a_call():
    before = torch._dynamo.config.recompile_limit, set(torch._dynamo.config.ignore_logging_functions)
    ort_accel.accelerate(nn.Linear(6, 6))(torch.randn(3, 6))
    assert (torch._dynamo.config.recompile_limit, set(torch._dynamo.config.ignore_logging_functions)) == before


def test_the_counters_that_are_read_exist():
    """Private to torch: where this fails, `capture/dynamo.py` must learn how this torch counts graph breaks."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    @torch.compile(backend="eager")
    def broken(x):
        torch._dynamo.graph_break()
        return x + 1

    broken(torch.ones(2))
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 1


@pytest.mark.parametrize("dynamic", [False, None])
def test_sizes_that_torch_compile_keeps_fixed_are_noted(dynamic):
    """`accelerate launch --dynamo_backend onnxrt` asks for fixed sizes."""
    config = {"engine": {"onnx_prefix": f"fixed_{dynamic}"}}
    torch.compile(nn.Linear(6, 6), backend="onnxrt", dynamic=dynamic, options={"config": config})(torch.randn(3, 6))
    assert (FIXED_SIZES in registered(ort_accel.load_config(config)).report.notes) == (dynamic is False)


def test_a_stance_for_eager_mode_is_obeyed():
    eager, ours = pair(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
    for _ in range(4):
        assert_step_as_eager(eager, ours, torch.ones(3, 4))
    with torch.compiler.set_stance("force_eager"):
        assert_same(step(ours, torch.ones(5, 4)), step(eager, torch.ones(5, 4)), rtol=0, atol=0)
    assert compilations(ours) == 2
