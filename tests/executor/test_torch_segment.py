"""A segment that PyTorch runs keeps nothing longer than eager mode does."""

from __future__ import annotations

import weakref

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ort_accel.compiler.compile_graph import Lowering, lower_graph
from ort_accel.reporting.report import Report
from ort_accel.runtime.session import SessionSettings
from ort_accel.runtime.sessions import Sessions

ALIVE = []
WATCHED = []


@torch.library.custom_op("pytorch_segment_tests::look", mutates_args=())
def look(x: torch.Tensor) -> torch.Tensor:
    ALIVE.append(WATCHED[-1]() is not None)
    return x.clone()


@look.register_fake
def _(x):
    return torch.empty_like(x)


def test_an_input_is_freed_after_its_last_use():
    def function(x):
        return [look(look(x).sin() + x).cos()]

    traced = make_fx(function, tracing_mode="fake")(torch.ones(4))
    wanted = Lowering(Sessions(SessionSettings(threads=1)), 20, Report(), unwanted=frozenset({"aten.sin", "aten.add"}))
    program = lower_graph(traced, wanted, "forward 0")
    given = torch.ones(4)
    expected = torch.cos(torch.sin(given) + given)
    WATCHED.append(weakref.ref(given))
    inputs = [given]
    del given
    [result] = program(inputs)
    assert ALIVE == [True, False]
    torch.testing.assert_close(result, expected)
