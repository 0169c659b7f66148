"""Synthetic inputs could come from a batch."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from ort_accel.autotune.synthetic_inputs import synthetic_inputs
from ort_accel.kernels.attention_packed import FULL
from ort_accel.kernels.packed_rows import own

BATCH, LENGTH = 3, 8


def graph_of(**inputs):
    """A graph with these inputs, by name."""
    graph = fx.Graph()
    nodes = {}
    for name, value in inputs.items():
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["val"] = value
    return graph, nodes


def numbers(count):
    return torch.full((count,), 99)


@pytest.mark.parametrize("count", [BATCH, 7, 20, BATCH * LENGTH])
def test_rows_places_and_spans_fit_each_other(count):
    heads = torch.empty(count, 2, 4)
    graph, nodes = graph_of(
        source=torch.empty(BATCH * LENGTH, 4),
        rows=numbers(count),
        places=numbers(BATCH * LENGTH),
        heads=heads,
        spans=torch.full((BATCH, 5), 99),
        kept=torch.empty(BATCH, 2, LENGTH, LENGTH, dtype=torch.bool),
    )
    graph.call_function(own.rows_of.default, (nodes["source"], nodes["rows"], nodes["places"]))
    attention = [nodes["heads"]] * 3 + [nodes["spans"], nodes["rows"], nodes["rows"], None, nodes["kept"], 0.9, None]
    graph.call_function(own.scaled_dot_product_of_rows.default, tuple(attention))
    made = dict(zip(nodes, synthetic_inputs(list(nodes.values())), strict=True))

    rows, places, spans = made["rows"].tolist(), made["places"].tolist(), made["spans"].tolist()
    assert sorted(set(rows)) == rows
    assert len(rows) == count
    assert places == [rows.index(place) if place in rows else -1 for place in range(BATCH * LENGTH)]
    assert [row // LENGTH for row in rows] == [number for number, span in enumerate(spans) for _ in range(*span[:2])]
    assert all(span[:2] == span[2:4] and span[4] == FULL for span in spans)
    out, _ = own.scaled_dot_product_of_rows(*(made[a.name] if isinstance(a, fx.Node) else a for a in attention))
    assert out.isfinite().all()


def test_rows_without_attention_are_the_first_ones():
    graph, nodes = graph_of(source=torch.empty(5, 4), rows=numbers(2), places=numbers(5))
    graph.call_function(own.rows_of.default, tuple(nodes.values()))
    _, rows, places = synthetic_inputs(list(nodes.values()))
    assert rows.tolist() == [0, 1]
    assert places.tolist() == [0, 1, -1, -1, -1]


def test_other_inputs_are_small_numbers_of_the_same_shape_and_dtype():
    flags = torch.zeros(2, dtype=torch.bool)
    _, nodes = graph_of(matrix=torch.empty(3, 4).t(), numbers=numbers(3), flags=flags, size=7)
    matrix, integers, flags, size = synthetic_inputs(list(nodes.values()))
    assert (matrix.shape, matrix.stride()) == ((4, 3), (1, 4))
    assert 0 < matrix.abs().max() <= 0.1
    assert integers.tolist() == [0, 0, 0]
    assert flags.all()
    assert size == 7
