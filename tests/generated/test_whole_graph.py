"""A whole segment is described, compiled by Inductor, and run by its program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ort_accel.executor.build_model import build
from ort_accel.executor.ort_segment import Fallback, OrtSegment
from ort_accel.generated.builds import compile_parts, why_no_code
from ort_accel.generated.description import Description, NotDescribable
from ort_accel.generated.program import InductorProgram
from ort_accel.generated.whole_graph import WholeGraph, whole_graph
from ort_accel.graph.meta_keys import RUNS_AFTER
from ort_accel.native.library import native_library
from ort_accel.runtime.session import SessionSettings
from ort_accel.runtime.sessions import Sessions
from tests.executor.one_session import OPSET
from tests.generated.traced import Arguments, Traced, normal
from tests.generated.watched import no

pytestmark = pytest.mark.skipif(native_library() is None, reason="the native library was not built")
functional = nn.functional


class InPyTorch(Exception):
    """Raised where a segment would run in PyTorch."""


def in_pytorch(*_: object) -> Any:
    raise InPyTorch


class Segment:
    """A function as a segment."""

    def __init__(self, function: Callable[..., Any], *args: Tensor) -> None:
        traced = Traced(function, args, "symbolic")
        self.graph = traced.segment
        model = build(self.graph.body, self.graph.wanted, OPSET, self.graph.called)
        self.segment = OrtSegment(model, Sessions(SessionSettings(threads=2)), no, Fallback(in_pytorch, no), "test")
        self.given = Arguments(traced, model.given)

    @property
    def whole(self) -> WholeGraph:
        return whole_graph(self.segment, self.graph)


IDS = torch.tensor([[3, 1, 4], [1, 5, 2]])

CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "products and norms": (
        lambda x, w: functional.layer_norm(functional.gelu(x @ w.t()), [7]).softmax(-1),
        (normal(6, 5), normal(7, 5)),
    ),
    "several results": (lambda x, w: (x @ w, (x @ w).relu().sum(0), x.t() * 2), (normal(6, 5), normal(5, 3))),
    "attention": (functional.scaled_dot_product_attention, (normal(2, 3, 6, 8),) * 3),
    "embedding": (lambda w, i: functional.embedding(i, w).sin() * 2, (normal(9, 4), IDS)),
    "sums at positions": (
        lambda x, i: [x.new_zeros(7, 4).index_put([i], (x * number).exp(), True) for number in range(4)],
        (normal(6, 4), IDS.reshape(-1)),
    ),
    "a constant": (lambda x: x * torch.tensor([1.0, 2.0, 3.0]), (normal(6, 3),)),
    "parts": (lambda x: torch.var_mean(torch.cat([part.exp() for part in x.split(2, -1)], 0), 0), (normal(6, 4),)),
    "dropout": (lambda x, w: functional.dropout(x @ w, 0.5) + torch.rand_like(x), (normal(6, 6), normal(6, 6))),
    "convolution": (lambda x, w: functional.conv2d(x, w, stride=2).relu(), (normal(2, 3, 9, 8), normal(4, 3, 3, 3))),
    "bf16": (lambda x, w: (x @ w).float().softmax(-1).bfloat16(), (normal(6, 6).bfloat16(), normal(6, 6).bfloat16())),
}


@pytest.mark.parametrize("name", CASES)
def test_a_description_computes_what_the_function_does(name: str) -> None:
    function, args = CASES[name]
    segment = Segment(function, *args)
    whole = segment.whole
    described = Description(whole.source, name)
    tensors, symbols = segment.given(*args)
    sizes = [symbols[symbol] for symbol in whole.names]
    assert sizes == list(whole.hints.values())
    torch.manual_seed(0)
    expected = function(*args)
    torch.manual_seed(0)
    found = described.run(*sizes, *tensors, *whole.constants)
    torch.testing.assert_close(list(found), list(expected) if isinstance(expected, tuple | list) else [expected])


def test_recomputed_products_keep_an_order_and_are_not_described() -> None:
    segment = Segment(lambda x: x.sigmoid() @ x, normal(4, 4))
    next(node for node in segment.graph.body.nodes if "sigmoid" in node.name).meta[RUNS_AFTER] = ("x",)
    assert "aten.sigmoid" in segment.whole.source
    next(node for node in segment.graph.body.nodes if "mm" in node.name).meta[RUNS_AFTER] = ("sigmoid",)
    with pytest.raises(NotDescribable, match="an order"):
        _ = segment.whole


def test_what_writes_into_its_inputs_is_not_described() -> None:
    segment = Segment(lambda x: x.sin().exp(), normal(4, 4))
    next(node for node in segment.graph.body.nodes if "exp" in node.name).target = torch.ops.aten.exp_.default
    with pytest.raises(NotDescribable, match="an order"):
        _ = segment.whole


@pytest.fixture(scope="module")
def programs() -> dict[str, tuple[Segment, InductorProgram]]:
    """The programs of all cases, from one process."""
    if why_no_code():
        pytest.skip(why_no_code())
    segments = {f"graph_{at}": Segment(*CASES[name][:1], *CASES[name][1]) for at, name in enumerate(CASES)}
    wholes = {name: segment.whole for name, segment in segments.items()}
    library, outcomes = compile_parts(wholes, None)
    found = {}
    for (name, segment), case in zip(segments.items(), CASES, strict=True):
        assert not outcomes[name].error, outcomes[name].error
        program = InductorProgram(segment.segment, name, wholes[name], outcomes[name].wrapper, library)
        found[case] = (segment, program)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_program_computes_what_the_function_does(
    name: str, programs: dict[str, tuple[Segment, InductorProgram]]
) -> None:
    function, args = CASES[name]
    segment, program = programs[name]
    tensors, symbols = segment.given(*args)
    torch.manual_seed(0)
    wanted = function(*args)
    expected = list(wanted) if isinstance(wanted, tuple | list) else [wanted]
    torch.manual_seed(0)
    found = list(program(tensors, symbols))
    assert not program.error
    torch.testing.assert_close(found, expected)
    assert program.result_bytes(symbols) == sum(each.nbytes for each in found)
    for ours, eager in zip(found, segment.graph.wanted, strict=True):
        assert ours.stride() == tuple(map(int, eager.meta["val"].stride()))


def test_an_index_out_of_range_runs_the_segment(programs: dict[str, tuple[Segment, InductorProgram]]) -> None:
    segment, program = programs["embedding"]
    tensors, symbols = segment.given(normal(9, 4), IDS + 5)
    with pytest.raises(InPyTorch):
        program(tensors, symbols)
    assert not program.has_given_up, "it was the batch's fault"
