"""Clusters are connected operators that one kernel can compute, and no path leaves a cluster and enters it again."""

from __future__ import annotations

from collections.abc import Callable
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from ort_accel.generated import clusters
from ort_accel.generated.clusters import LEAST_SAVED_BYTES, Cluster, find_clusters, is_free
from ort_accel.generated.description import Layout
from ort_accel.graph.meta_keys import RUNS_AFTER
from ort_accel.graph.nodes import is_random
from ort_accel.kernels.kernel_call import KernelCall, Output
from ort_accel.native.library import native_library
from tests.executor.one_session import all_called
from tests.generated.traced import Traced, kernels_first, normal

SIZE = (512, 512)
X, Y = normal(*SIZE), normal(512, 512, dtype=torch.float64).float()
functional = nn.functional


def sources(function: Callable[..., Any], *args: Tensor, mode: str = "fake") -> list[str]:
    return [cluster.source for cluster in Traced(function, args, mode).clusters()]


def described(cluster: Cluster) -> dict[str, Any]:
    """Returns the functions of a cluster's module."""
    names: dict[str, Any] = {"torch": torch, "Layout": Layout}
    exec(cluster.source, names)
    return names


def test_connected_operators_are_one_cluster() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x.sin() * y).softmax(-1) + x.sum(0).exp()

    (cluster,) = Traced(function, (X, Y)).clusters()
    assert [str(node) for node in cluster.nodes] == ["sin", "mul", "_softmax", "sum_1", "exp", "add"]
    assert [str(node) for node in cluster.inputs] == ["x_1", "y_1"]
    assert [str(node) for node in cluster.outputs] == ["add"]


def test_a_cluster_saves_the_traffic_of_its_intermediate_results() -> None:
    (cluster,) = Traced(lambda x: (x.sin() * x).exp(), (X,)).clusters()
    assert cluster.saved_bytes == (3 + 4 - 2) * X.nbytes, "three are written, four are read; one of each remains"


def test_operators_that_are_not_connected_are_clusters_of_their_own() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().exp(), y.cos().tanh()

    assert Traced(function, (X, Y)).operators() == [["sin", "exp"], ["cos", "tanh"]]


def test_operators_that_read_the_same_input_only_are_not_connected() -> None:
    assert Traced(lambda x: (x.sin().exp(), x.cos().tanh()), (X,)).operators() == [["sin", "exp"], ["cos", "tanh"]]


def test_a_matrix_product_separates_clusters() -> None:
    traced = Traced(lambda x, y: (torch.mm(x.sin().exp(), y) * 2).tanh(), (X, Y))
    assert traced.operators() == [["sin", "exp"], ["mul", "tanh"]]


def test_a_path_around_a_matrix_product_does_not_join_what_lies_before_and_behind_it() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        before = x.sin().exp()
        return (torch.mm(before, y) * before).tanh()

    first, second = Traced(function, (X, Y)).clusters()
    assert [str(node) for node in first.nodes] == ["sin", "exp"]
    assert [str(node) for node in second.nodes] == ["mul", "tanh"]
    assert set(second.inputs) == {second.nodes[0].args[0], first.nodes[1]}


STEPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul": torch.mul,
    "sin": lambda x, _: x.sin(),
    "softmax": lambda x, _: x.softmax(-1),
    "product": torch.mm,
    "sorted": lambda x, _: x.sort(-1).values,
    "view": lambda x, y: x.t() + y,
    "parts": lambda x, y: torch.cat([x.split(256, -1)[1], y.split(256, -1)[0]], -1),
    "draw": lambda x, y: torch.rand_like(x) * y,
    "zeros": lambda x, _: torch.zeros_like(x),
    "norm": lambda x, _: torch.native_layer_norm(x, [512], None, None, 1e-5)[0],
    "scaled by a row": lambda x, y: x * y[3],
}


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[tuple[str, int, int]], list[tuple[int, int]], bool]:
    """Steps, each of which reads two of what is there before it; pairs of nodes of which one waits for the other."""
    count = draw(st.integers(3, 18))
    steps = [
        (draw(st.sampled_from(list(STEPS))), draw(st.integers(max(0, at - 3), at + 1)), draw(st.integers(0, at + 1)))
        for at in range(count)
    ]
    waits = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=4))
    return steps, waits, draw(st.booleans())


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(graphs())
def test_no_path_enters_a_cluster_again(drawn: tuple[list[tuple[str, int, int]], list[tuple[int, int]], bool]) -> None:
    steps, waits, native = drawn

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        values = [x, y]
        for name, one, other in steps:
            values.append(STEPS[name](values[one], values[other]))
        return values[2:]

    traced = Traced(function, (X, Y), refused=kernels_first if native else all_called)
    segment = traced.segment
    nodes = [node for node in segment.body.nodes if node.op == "call_function"]
    for one, other in waits:
        first, second = sorted((one % len(nodes), other % len(nodes)))
        if first != second:
            nodes[second].meta.setdefault(RUNS_AFTER, []).append(nodes[first].name)
    unit: dict[fx.Node, object] = {node: node for node in nodes}
    for cluster in traced.clusters():
        assert not any(map(is_random, cluster.nodes))
        for node in cluster.nodes:
            assert unit[node] is node, "it is in two clusters"
            unit[node] = id(cluster)
    named = {node.name: node for node in nodes}
    sorter: TopologicalSorter[object] = TopologicalSorter()
    for node in nodes:
        kernel = segment.called.get(node)
        read = [
            *node.all_input_nodes,
            *(item for item in (kernel.arguments if kernel else ()) if isinstance(item, fx.Node)),
        ]
        read += [named[name] for name in node.meta.get(RUNS_AFTER, ())]
        if not is_free(node):
            before = {unit[item] for each in read for item in computed(each) if item in unit}
            sorter.add(unit[node], *(before - {unit[node]}))
    sorter.prepare()  # raises an error if units wait for each other


def computed(node: fx.Node) -> set[fx.Node]:
    """Returns the node, or those whose results it looks through."""
    return {node} if not is_free(node) else {source for item in node.all_input_nodes for source in computed(item)}


def test_random_numbers_are_not_drawn_in_a_cluster() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.bernoulli(x.sin().sigmoid()) * 2 + x

    assert Traced(function, (X,)).operators() == [["sin", "sigmoid"], ["mul", "add"]]


def test_operators_of_which_one_runs_after_the_other_are_not_in_one_cluster() -> None:
    traced = Traced(lambda x: x.sin().exp().cos().tanh(), (X,))
    assert traced.operators() == [["sin", "exp", "cos", "tanh"]]
    named = {node.name: node for node in traced.segment.body.nodes}
    named["cos"].meta[RUNS_AFTER] = ["exp"]
    assert traced.operators() == [["sin", "exp"], ["cos", "tanh"]]


def test_operators_that_wait_for_a_node_of_an_earlier_segment_stay_together() -> None:
    traced = Traced(lambda x: x.sin().exp().cos(), (X,))
    traced.segment.body.nodes[1].meta[RUNS_AFTER] = ["a node of another segment"]
    assert traced.operators() == [["sin", "exp", "cos"]]


def test_views_are_repeated_within_and_cost_nothing() -> None:
    (plain,) = Traced(lambda x: x.sin() + x, (X,)).clusters()
    (viewed,) = Traced(lambda x: x.t().view(512, 4, 128).sin().view(512, 512) + x.t(), (X,)).clusters()
    assert [str(node) for node in viewed.nodes] == ["sin", "add"]
    assert viewed.inputs == [node for node in viewed.inputs if node.op == "placeholder"], "not the view"
    assert viewed.source.count("aten.view.default") == 2
    assert viewed.source.count("aten.t.default") == 2
    assert viewed.saved_bytes == plain.saved_bytes


def test_parts_of_a_view_are_repeated_within() -> None:
    def function(x: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        return one.sin() * other

    (cluster,) = Traced(function, (X,)).clusters()
    assert [str(node) for node in cluster.inputs] == ["x_1"]
    assert cluster.source.count("operator.getitem") == 2


def test_constant_tensors_are_made_within() -> None:
    def function(x: Tensor) -> Tensor:
        return x * torch.arange(512, dtype=torch.float32) + torch.full((512,), 0.5).exp()

    (cluster,) = Traced(function, (X,)).clusters()
    assert [str(node) for node in cluster.inputs] == ["x_1"]
    assert "aten.arange" in cluster.source
    assert "aten.full" in cluster.source


def test_a_result_that_others_read_through_a_view_is_an_output() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        inner = x.sin()
        return torch.mm(inner.t(), y), inner.exp().view(-1)

    (cluster,) = Traced(function, (X, Y)).clusters()
    assert [str(node) for node in cluster.outputs] == ["sin", "exp"]


def test_parts_of_results_are_outputs() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return torch.native_layer_norm(x.sin(), [512], None, None, 1e-5)[:2]

    (cluster,) = Traced(function, (X,)).clusters()
    assert [str(node) for node in cluster.outputs] == ["getitem", "getitem_1"]


def test_equal_clusters_have_equal_modules() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.mm((x * 0.5).tanh() + x, y)
        return (x * 0.25).tanh() + x

    first, second, other = sources(function, X, Y)
    assert first == second != other
    assert other == first.replace("0.5", "0.25")


def test_a_module_computes_the_cluster() -> None:
    (cluster,) = Traced(lambda x: ((x * 2).softmax(-1), x.t().exp() + float("-inf")), (X,)).clusters()[:1]
    torch.testing.assert_close(described(cluster)["run"](X), ((X * 2).softmax(-1),))


def test_open_sizes_are_symbols_in_the_order_in_which_they_appear() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return x.view(-1, 4, 64).sin() * y + x.shape[0]

    (cluster,) = Traced(function, (normal(512, 256), normal(4, 64)), "symbolic").clusters()
    assert cluster.hints == {"s0": 512, "s1": 256, "s2": 64}
    names = described(cluster)
    assert names["run"].__code__.co_varnames[:4] == ("s0", "s1", "s2", "a0")
    inputs, (output,) = names["inputs"](6, 8, 2), names["outputs"](6, 8, 2)
    assert [(each.shape, each.strides) for each in inputs] == [((6, 8), (8, 1)), ((4, 2), (2, 1))]
    assert (output.shape, output.strides) == ((6, 4, 2), (8, 2, 1))


def test_clusters_with_other_symbols_of_the_graph_are_equal() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin() * 2, y.sin() * 2

    one, other = Traced(function, (normal(512, 256), normal(300, 700)), "symbolic").clusters()
    assert one.source == other.source
    assert one.hints == {"s0": 512, "s1": 256}
    assert other.hints == {"s0": 300, "s1": 700}
    assert not set(map(str, one.symbols)) & set(map(str, other.symbols))


def test_only_the_given_operators_are_members() -> None:
    traced = Traced(lambda x: x.sin().exp().cos().tanh(), (X,))
    names = {"aten.sin.default", "aten.exp.default", "aten.tanh.default"}
    assert traced.operators(names) == [["sin", "exp"]]
    assert traced.operators({"aten.sin.default"}) == []


def test_a_cluster_that_saves_too_little_is_left_out() -> None:
    rows = LEAST_SAVED_BYTES // (2 * 4 * 512)
    assert Traced(lambda x: x.sin().exp(), (normal(rows, 512),)).operators() == [["sin", "exp"]]
    assert Traced(lambda x: x.sin().exp(), (normal(rows - 1, 512),)).operators() == []


def test_a_single_operator_is_left_out() -> None:
    assert Traced(lambda x: x.sin(), (normal(2048, 2048),)).operators() == []


def test_a_cluster_that_would_take_too_long_to_compile_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(lambda x: x.sin().exp().cos(), (X,))
    monkeypatch.setattr(clusters, "MAX_NODES", 2)
    assert traced.operators() == []


SEPARATE: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "positions in memory": ("as_strided", lambda x, ids: x.as_strided((512, 512), (1, 512))),
    "index": ("index", lambda x, ids: x[ids]),
    "gather": ("gather", lambda x, ids: x.gather(0, ids[:, None].expand(SIZE))),
    "rows": ("index_select", lambda x, ids: x.index_select(0, ids)),
    "embedding": ("embedding", lambda x, ids: functional.embedding(ids, x)),
    "sums by index": ("index_add", lambda x, ids: x.index_add(0, ids, x)),
    "sort": ("sort", lambda x, ids: x.sort(-1).values),
    "running sum": ("cumsum", lambda x, ids: x.cumsum(-1)),
    "what is written": ("sin_", lambda x, ids: x.sin_()),
    "complex numbers": ("complex", lambda x, ids: torch.complex(x, x).abs()),
}


@pytest.mark.parametrize("name", SEPARATE)
def test_an_operator_is_never_in_a_cluster(name: str) -> None:
    operator, apply = SEPARATE[name]
    traced = Traced(lambda x, ids: apply(x.sin().exp(), ids).cos() * 2, (X, torch.arange(512).flip(0)))
    names = [str(node.target) for node in traced.graph.nodes]
    assert any(f"aten.{operator}." in each for each in names)
    found = traced.clusters()
    assert [each.source.count(f"aten.{operator}.") for each in found] == [0, 0]
    assert found[0].outputs == [node for node in traced.graph.nodes if node.name == "exp"]


def test_what_follows_from_data_is_in_no_cluster() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x * y.sum().item()).exp().cos() + x[x > 0].sin().exp().sum()

    traced = Traced(function, (X, Y), "symbolic")
    nodes = list(traced.graph.nodes)
    found = find_clusters(nodes, [nodes[-1].args[0]], {})
    assert [[str(node) for node in each.nodes] for each in found] == [["exp", "cos", "add"]]


def test_types_that_kernels_lack_are_in_no_cluster() -> None:
    traced = Traced(lambda x: x.sin().exp().to(torch.int16).float().cos().tanh(), (X,))
    assert traced.operators() == [["sin", "exp"], ["cos", "tanh"]]


@pytest.mark.skipif(native_library() is None, reason="the native library was not built")
def test_operators_with_a_kernel_of_their_own_are_in_no_cluster_but_sums() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return functional.layer_norm(x.sin() + y, (512,)).cos() * 2

    calls = Traced(function, (X, Y), refused=kernels_first)
    assert {kernel.name for kernel in calls.segment.called.values() if kernel} >= {"add", "layer_norm"}
    assert calls.operators() == [["sin", "add"], ["cos", "mul"]]
    assert Traced(function, (X, Y)).operators() == [["sin", "add", "native_layer_norm", "cos", "mul"]]


def test_a_kernel_that_reads_a_result_has_it_as_an_output() -> None:
    """A kernel may read other nodes than its operator does."""
    traced = Traced(lambda x, y: torch.mm(x.sin().exp().cos(), y), (X, Y))
    body = traced.segment.body
    named = {node.name: node for node in body.nodes}
    calls = {**traced.segment.called, named["mm"]: KernelCall("product", (named["exp"], named["cos"], Output(0)))}
    (cluster,) = find_clusters(body.nodes, traced.segment.wanted, calls)
    assert [str(node) for node in cluster.outputs] == ["exp", "cos"]


def test_a_kernel_that_leaves_an_operand_unread_separates_clusters() -> None:
    """The node still reads the operand, and waits for it."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        before = x.sin().exp()
        return (torch.mm(before, y) * before).tanh()

    traced = Traced(function, (X, Y))
    body = traced.segment.body
    product = next(node for node in body.nodes if node.name == "mm")
    calls = {**traced.segment.called, product: KernelCall("product", (product.args[1], Output(0)))}
    first, second = find_clusters(body.nodes, traced.segment.wanted, calls)
    assert [str(node) for node in first.nodes] == ["sin", "exp"]
    assert [str(node) for node in second.nodes] == ["mul", "tanh"]


def test_members_are_in_the_order_of_the_graph() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        late = torch.mm(y.cos(), y)
        return (x.sin().exp() + y).tanh() * late

    for cluster in Traced(function, (X, Y)).clusters():
        assert all(one < other for one, other in pairwise(cluster.nodes))
