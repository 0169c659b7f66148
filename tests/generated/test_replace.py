"""A segment whose clusters are calls of kernels computes the same, and draws random numbers in the same order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ort_accel.generated.clusters import Cluster, find_clusters
from ort_accel.generated.replace import SegmentGraph, generated_kernel, replace_clusters
from ort_accel.graph.meta_keys import RUNS_AFTER
from ort_accel.graph.nodes import is_random
from ort_accel.kernels.kernel_call import KernelCall
from ort_accel.native.library import native_library
from tests.executor.one_session import all_called
from tests.generated.python_kernels import PythonKernel, in_python
from tests.generated.traced import ANY_BYTES, Session, Traced, kernels_first, normal

pytestmark = pytest.mark.skipif(native_library() is None, reason="the native library was not built")
functional = nn.functional
X, Y = normal(24, 24), normal(12, 2, 24).view(24, 24)


class Replaced:
    """A function, and its session with and without kernels for its clusters."""

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Tensor], mode: str = "fake", native: bool = False
    ) -> None:
        self.traced = Traced(function, args, mode, kernels_first if native else all_called)
        self.clusters: dict[str, list[Cluster]] = {}
        for cluster in self.traced.all_clusters():
            self.clusters.setdefault(f"test_replace_{abs(hash(cluster.source))}", []).append(cluster)
        self.kernels: Mapping[str, PythonKernel] = in_python(self.clusters)
        self.segment: SegmentGraph = replace_clusters(self.traced.segment, self.clusters)
        self.plain: Session = self.traced.session()
        self.session: Session = self.traced.session(self.segment)

    @property
    def calls(self) -> int:
        return sum(len(kernel.calls) for kernel in self.kernels.values())

    def assert_same(self, *args: Tensor) -> None:
        torch.manual_seed(3)
        expected, state = self.plain(*args), torch.get_rng_state()
        torch.manual_seed(3)
        found = self.session(*args)
        assert torch.equal(torch.get_rng_state(), state), "other random numbers were drawn"
        for one, other in zip(found, expected, strict=True):
            assert one.stride() == other.stride()
            torch.testing.assert_close(one, other)


def attention(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    scores = torch.mm(x.sin() * y, y.t() * 0.3 + x)
    weights = torch.bernoulli(scores.softmax(-1)) * scores.exp()
    return torch.mm(weights, y), weights.sum(0), weights.view(-1)


CASES: dict[str, tuple[Callable[..., Any], Sequence[Tensor], int]] = {
    "a chain": (lambda x, y: (x.sin() * y).exp(), (X, Y), 1),
    "around a product": (lambda x, y: (torch.mm(x.sin().exp(), y) * 2).tanh() + x.cos() * 3, (X, Y), 3),
    "several results": (attention, (X, Y), 3),
    "a result through a view": (lambda x, y: torch.mm((x.sin() * y).t()[2:], y), (X, Y), 1),
    "a result read within and outside": (lambda x, y: ((z := x.sin() * 2), torch.mm(z, y), z.exp())[1:], (X, Y), 1),
    "a part of an operator's results": (
        lambda x, y: torch.mm(torch.native_layer_norm(x.sin() * 2, [24], None, None, 1e-5)[0], y),
        (X, Y),
        1,
    ),
    "an input that is a part": (lambda x: (x.sort(-1).values.exp() * 2, x.sort(-1)[1] * 3 + 1), (X,), 2),
    "a view of an input": (lambda x, y: x[3:, ::2].exp() * y.t()[3:, 1::2], (X, Y), 1),
    "a transposed result": (lambda x, y: (x.t() * y.t()).exp(), (X, Y), 1),
    "channels last": (
        lambda x, w: functional.conv2d((x * 2).relu(), w).relu() + 1,
        (normal(2, 8, 6, 6).contiguous(memory_format=torch.channels_last), normal(8, 8, 3, 3)),
        2,
    ),
    "constants": (lambda x: torch.mm(x.exp() * torch.arange(24), torch.ones(24, 24)) + x, (X,), 1),
    "an index into a result": (lambda x, i: ((x.sin() * 2)[i].exp() + 1).cos(), (X, torch.arange(24).flip(0)), 2),
    "equal clusters": (lambda x, y: torch.mm(torch.mm(x.sin() * 2, y).sin() * 2, y), (X, Y), 2),
    "the same result twice": (lambda x: ((z := x.sin() * 2), z, z.view(-1)), (X,), 1),
    "nothing to replace": (lambda x, y: torch.mm(x, y).sin(), (X, Y), 0),
}


@pytest.mark.parametrize("native", [False, True], ids=["calls", "kernels"])
@pytest.mark.parametrize("name", CASES)
def test_a_replaced_segment_computes_the_same(name: str, native: bool) -> None:
    function, args, count = CASES[name]
    replaced = Replaced(function, args, native=native)
    for _ in range(2):
        replaced.assert_same(*args)
    names = [item for item in replaced.session.operators if item.startswith("test_replace_")]
    assert len(names) == sum(map(len, replaced.clusters.values())) == count
    assert replaced.calls == 2 * count
    assert len(replaced.session.operators) <= len(replaced.plain.operators)


def test_the_segment_is_left_as_it_is() -> None:
    replaced = Replaced(attention, (X, Y))
    assert not [node for node in replaced.traced.graph.nodes if node.target is generated_kernel]
    assert set(replaced.traced.segment.body.nodes).isdisjoint(replaced.segment.body.nodes)
    replaced.traced.graph.lint()


def test_only_the_chosen_clusters_are_replaced() -> None:
    replaced = Replaced(lambda x, y: torch.mm(x.sin().exp(), y).cos() * 2, (X, Y))
    chosen = dict(list(replaced.clusters.items())[:1])
    session = replaced.traced.session(replace_clusters(replaced.traced.segment, chosen))
    assert session.operators == [*chosen, "AtenCall", "AtenCall", "AtenCall"]
    torch.testing.assert_close(session(X, Y), replaced.plain(X, Y))


def test_sizes_may_change() -> None:
    def function(x: Tensor, y: Tensor) -> Sequence[Tensor]:
        inner = (x.sin() * x.shape[1]).t()
        return torch.mm(inner, y).softmax(-1) * 2, inner.reshape(-1)

    replaced = Replaced(function, (normal(10, 14), normal(10, 6)), "symbolic")
    for rows, columns, width in [(10, 14, 6), (3, 5, 7), (40, 2, 9)]:
        replaced.assert_same(normal(rows, columns), normal(rows, width))
    assert [size for kernel in replaced.kernels.values() for size in kernel.calls[1]] == [5, 3, 5, 7]


def test_random_numbers_are_drawn_in_the_same_order() -> None:
    def function(x: Tensor) -> Sequence[Tensor]:
        first = torch.rand_like(x.sin() * 2)
        second = torch.bernoulli((x.cos() * 0.1).sigmoid())
        third = torch.randn_like(x)
        return third.exp() + first, second * 2 + x, torch.rand_like(third) * 3

    replaced = Replaced(function, (X,))
    old, new = (
        [str(node.target) for node in segment.body.nodes if is_random(node)]
        for segment in (replaced.traced.segment, replaced.segment)
    )
    assert new == old
    assert len(set(old)) == 3
    replaced.assert_same(X)


def test_draws_keep_their_order_where_the_first_waits_for_a_later_cluster() -> None:
    """The first draw reads a cluster whose last node lies behind the second draw."""

    def function(x: Tensor) -> Sequence[Tensor]:
        inner = x.sin() * 2
        first = torch.bernoulli(inner.sigmoid())
        second = torch.rand_like(x)
        return first, second, inner.exp() + 1

    replaced = Replaced(function, (X,))
    assert [len(each.nodes) for (each,) in replaced.clusters.values()] == [5]
    assert [str(node.target) for node in replaced.segment.body.nodes if is_random(node)] == [
        "aten.bernoulli.default",
        "aten.rand_like.default",
    ]
    replaced.assert_same(X)


def test_a_result_that_only_a_kernel_reads_is_an_output() -> None:
    """The kernel of a product with a sum reads two tensors that its operator does not."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.add((x.sin() * 2).cos(), y)

    traced = Traced(function, (X, Y), refused=kernels_first)
    body = traced.segment.body
    named = {node.name: node for node in body.nodes}
    kernel = traced.segment.called[named["add"]]
    assert isinstance(kernel, KernelCall)
    assert kernel.arguments[0] is named["cos"]
    other = KernelCall(kernel.name, (named["mul"], *kernel.arguments[1:]))
    calls = {**traced.segment.called, named["add"]: other}
    segment = SegmentGraph(body, traced.segment.wanted, calls)
    operators = {"aten.sin.default", "aten.mul.Tensor", "aten.cos.default"}
    found = find_clusters(body.nodes, segment.wanted, calls, operators, ANY_BYTES)
    (cluster,) = found
    assert [str(node) for node in cluster.outputs] == ["mul", "cos"]
    in_python({"test_replace_reads": [cluster]})
    session = traced.session(replace_clusters(segment, {"test_replace_reads": [cluster]}))
    torch.testing.assert_close(session(X, Y), [X.sin() * 2 + Y])


def test_strides_that_a_kernel_gets_are_those_of_the_new_tensors() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        q = (x * 2).sin().view(2, 3, 4, 8)
        return functional.scaled_dot_product_attention(q, q * y, q + 1).exp() * 2

    args = normal(24, 8), normal(4, 8)
    for native in (False, True):
        Replaced(function, args, native=native).assert_same(*args)


def test_a_node_waits_for_what_it_runs_after() -> None:
    """That reads a cluster which ends behind the node that waits."""

    def function(x: Tensor, y: Tensor) -> Sequence[Tensor]:
        inner = x.sin() * 2
        return torch.mm(inner, y), torch.mm(y, y), inner.exp() + 1

    replaced = Replaced(function, (X, Y))
    named = {node.name: node for node in replaced.traced.segment.body.nodes}
    named["mm_1"].meta[RUNS_AFTER] = ["mm"]
    segment = replace_clusters(replaced.traced.segment, replaced.clusters)
    products = [node for node in segment.body.nodes if node.target is torch.ops.aten.mm.default]
    assert [product.args[0].op for product in products] == ["call_function", "placeholder"]


def test_a_cluster_runs_behind_what_its_nodes_run_after() -> None:
    replaced = Replaced(lambda x, y: (torch.mm(x, y), y.sin() * 2), (X, Y))
    named = {node.name: node for node in replaced.traced.segment.body.nodes}
    named["sin"].meta[RUNS_AFTER] = ["mm"]
    nodes = replace_clusters(replaced.traced.segment, replaced.clusters).body.nodes
    targets = [node.target for node in nodes if node.op == "call_function"]
    assert targets.index(torch.ops.aten.mm.default) < targets.index(generated_kernel)


def test_a_cluster_runs_where_its_last_node_is() -> None:
    """What it reads would allow it to run at once, and its results would then be in memory for longer."""

    def function(x: Tensor, y: Tensor) -> Sequence[Tensor]:
        inner = y.sin()
        return torch.mm(torch.mm(x, y), y), inner * 2

    targets = [node.target for node in Replaced(function, (X, Y)).segment.body.nodes]
    products = [at for at, target in enumerate(targets) if target is torch.ops.aten.mm.default]
    assert targets.index(generated_kernel) > products[-1]


STEPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul": torch.mul,
    "sin": lambda x, _: x.sin(),
    "softmax": lambda x, _: x.softmax(-1),
    "product": torch.mm,
    "view": lambda x, y: x.t() + y,
    "parts": lambda x, y: torch.cat([x.split(12, -1)[1], y.split(12, -1)[0]], -1),
    "draw": lambda x, y: torch.rand_like(x) * y,
    "norm": lambda x, _: torch.native_layer_norm(x, [24], None, None, 1e-5)[0],
    "a row": lambda x, y: x * y[3],
    "a number": lambda x, y: x + y.sum() / 99,
}


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Steps, each of which reads two of what is there before it."""
    return [
        (draw(st.sampled_from(list(STEPS))), draw(st.integers(max(0, at - 2), at + 1)), draw(st.integers(0, at + 1)))
        for at in range(draw(st.integers(2, 10)))
    ]


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(steps(), st.booleans())
def test_any_segment_computes_the_same(drawn: list[tuple[str, int, int]], native: bool) -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        values = [x, y]
        for name, one, other in drawn:
            values.append(STEPS[name](values[one], values[other]))
        return values[2:][::2] or values[2:]

    Replaced(function, (X, Y), native=native).assert_same(X, Y)


def test_the_stand_in_is_never_called() -> None:
    with pytest.raises(AssertionError, match="runs in a session"):
        generated_kernel()
