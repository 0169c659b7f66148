"""Products by oneDNN: eager's results, and only for sizes that come again."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from ort_accel.kernels import onednn_matmul
from ort_accel.kernels.onednn_matmul import (
    MAX_COUNTED_SIZES,
    MAX_ONEDNN_SIZES,
    MAX_RIGHT_BYTES,
    ONEDNN_FROM_CALL,
    can_multiply,
    onednn_for_frequent_sizes,
    onednn_product,
)

aten = torch.ops.aten


def laid(rows, columns, layout):
    """A matrix that lies in memory as itself, as its transpose, with gaps, or as one row for all."""
    made = {
        "plain": lambda: torch.randn(rows, columns),
        "transposed": lambda: torch.randn(columns, rows).t(),
        "with gaps": lambda: torch.randn(rows, 2 * columns)[:, ::2],
        "one row": lambda: torch.randn(1, columns).expand(rows, columns),
    }
    return made[layout]()


LAYOUTS = ("plain", "transposed", "with gaps", "one row")


@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("sizes", [(9, 7, 41), (1, 5, 1), (0, 5, 3), (128, 64, 96)], ids=str)
def test_a_product_is_eagers_however_its_operands_lie(sizes, left, right):
    rows, inner, columns = sizes
    one, other, row = laid(rows, inner, left), laid(inner, columns, right), torch.randn(columns)
    for found, expected in (
        (onednn_product(one, other), one.mm(other)),
        (onednn_product(row, one, other), torch.addmm(row, one, other)),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert found.is_contiguous()


@pytest.mark.parametrize(
    ("sizes", "left", "turns"),
    [
        ((96, 64, 24), "transposed", True),
        ((24, 64, 96), "transposed", False),
        ((96, 64, 24), "plain", False),
        ((96, 64, 24), "with gaps", False),
    ],
    ids=["a large left one", "a small left one", "as it lies", "with gaps"],
)
def test_the_smaller_operand_is_copied(sizes, left, turns, monkeypatch):
    rows, inner, columns = sizes
    one, other = laid(rows, inner, left), laid(inner, columns, "plain")
    shapes = []
    plain = onednn_matmul._product
    monkeypatch.setattr(onednn_matmul, "_product", lambda *given: shapes.append(given[0].shape) or plain(*given))
    found = onednn_product(one, other)
    assert shapes == [(columns, inner) if turns else (rows, inner)]
    torch.testing.assert_close(found, one.mm(other), rtol=1e-5, atol=1e-5)
    assert found.is_contiguous()


def called(target, *operands, **options):
    graph = fx.Graph()
    nodes = []
    for number, operand in enumerate(operands):
        nodes.append(graph.placeholder(f"given_{number}"))
        nodes[-1].meta["val"] = operand
    node = graph.call_function(target, tuple(nodes), options)
    node.meta["val"] = target(*operands, **options)
    return node


ONE, OTHER = torch.randn(8, 4), torch.randn(4, 6)


@pytest.mark.parametrize(
    ("node", "can"),
    [
        (called(aten.mm.default, ONE, OTHER), True),
        (called(aten.addmm.default, torch.randn(6), ONE, OTHER), True),
        (called(aten.addmm.default, torch.randn(8, 6), ONE, OTHER), False),
        (called(aten.addmm.default, torch.randn(6), ONE, OTHER, beta=0.5), False),
        (called(aten.mm.default, ONE.double(), OTHER.double()), False),
        (called(aten.mm.default, ONE.bfloat16(), OTHER.bfloat16()), False),
        (called(aten.bmm.default, ONE[None], OTHER[None]), False),
        (called(aten.mm.default, torch.zeros(1, MAX_RIGHT_BYTES // 16), torch.zeros(MAX_RIGHT_BYTES // 16, 4)), True),
        (
            called(aten.mm.default, torch.zeros(1, MAX_RIGHT_BYTES // 16), torch.zeros(MAX_RIGHT_BYTES // 16, 5)),
            False,
        ),
    ],
    ids=[
        *("product", "with a row", "with a matrix", "with a scaled row", "float64", "bfloat16", "of batches"),
        *("by a large matrix", "by a larger one"),
    ],
)
def test_single_precision_alone_is_multiplied_and_what_takes_little_memory(node, can):
    assert can_multiply(node) is can


@pytest.fixture
def seen(monkeypatch):
    """The number of rows of each product that oneDNN was asked for."""
    rows = []

    def noted(*operands):
        rows.append(operands[-2].shape[0])
        return onednn_product(*operands)

    monkeypatch.setattr(onednn_matmul, "onednn_product", noted)
    return rows


def run(multiply, rows):
    one = torch.randn(rows, 4)
    torch.testing.assert_close(multiply(one, OTHER), one.mm(OTHER))


def test_onednn_is_asked_for_sizes_that_come_again(seen):
    multiply = onednn_for_frequent_sizes(aten.mm.default)
    for _ in range(ONEDNN_FROM_CALL + 2):
        run(multiply, 8)
    assert seen == [8] * 3
    run(multiply, 9)
    assert seen == [8] * 3


def test_where_each_batch_has_another_size_it_is_never_asked(seen):
    multiply = onednn_for_frequent_sizes(aten.mm.default)
    for rows in [*range(2, 4 * MAX_COUNTED_SIZES)] * 2:
        run(multiply, rows)
    assert seen == []


def test_it_is_asked_for_a_few_sizes_at_most(seen):
    multiply = onednn_for_frequent_sizes(aten.mm.default)
    for rows in range(2, 2 * MAX_ONEDNN_SIZES + 2):
        for _ in range(ONEDNN_FROM_CALL):
            run(multiply, rows)
    assert set(seen) == set(range(2, MAX_ONEDNN_SIZES + 2))


def test_each_product_counts_its_own_sizes(seen):
    one, other = onednn_for_frequent_sizes(aten.mm.default), onednn_for_frequent_sizes(aten.mm.default)
    for _ in range(ONEDNN_FROM_CALL - 1):
        run(one, 8)
        run(other, 8)
    assert seen == []
