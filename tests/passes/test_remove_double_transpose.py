"""A transpose of a transpose is not taken, and nothing else is changed by that."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ort_accel.passes.options import PassOptions
from ort_accel.passes.remove_double_transpose import remove_double_transpose

aten = torch.ops.aten
X = torch.arange(24.0).view(2, 3, 4)
TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)


def transposes(module):
    return sum(node.target in TRANSPOSES for node in module.graph.nodes)


def there_and_back(x):
    return (
        aten.t(aten.t(x[0] * 2)),
        aten.transpose(aten.transpose(x * 3, 0, -1), 2, 0),
        aten.permute(aten.permute(x * 4, [2, 0, 1]), [1, -1, 0]),
    )


def elsewhere(x):
    y = x * 2
    return (
        aten.transpose(aten.transpose(y, 0, 1), 1, 2),
        aten.permute(aten.permute(y, [2, 0, 1]), [2, 0, 1]),
        aten.permute(aten.transpose(y, 0, 1), [0, 1, 2]),
    )


def mixed(x):
    y = x * 2
    return aten.permute(aten.transpose(y, 1, 2), [0, 2, 1]), aten.transpose(aten.t(y[0]), -1, 0).sum(0)


def of_a_linear_layer(x):
    weight = torch.arange(12.0, requires_grad=True).view(3, 4)
    (gradient,) = torch.autograd.grad(torch.nn.functional.linear(x, weight).square().sum(), weight)
    return gradient


@pytest.mark.parametrize(("compute", "count"), [(there_and_back, 3), (elsewhere, 0), (mixed, 2)])
def test_only_transposes_that_undo_each_other_are_removed(compute, count):
    module = make_fx(compute)(X)
    before = transposes(module)
    assert remove_double_transpose(module.graph, PassOptions()) == count
    module.recompile()
    assert transposes(module) == before - 2 * count
    for found, expected in zip(module(X), compute(X), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert found.stride() == expected.stride()


def test_an_inner_transpose_with_another_reader_stays():
    def compute(x):
        turned = aten.t(x * 2)
        return turned.sum(0), aten.t(turned)

    module = make_fx(compute)(X[0])
    assert remove_double_transpose(module.graph, PassOptions()) == 1
    assert transposes(module) == 1
    module.recompile()
    torch.testing.assert_close(module(X[0]), compute(X[0]))


def test_an_input_is_not_returned_in_place_of_its_view():
    module = make_fx(lambda x: aten.t(aten.t(x)))(X[0])
    assert remove_double_transpose(module.graph, PassOptions()) == 0
    module.recompile()
    assert module(X[0]) is not X[0]


def test_a_result_is_not_returned_twice_in_place_of_its_view():
    def compute(x):
        y = x * 2
        return y, aten.t(aten.t(y)), aten.t(aten.t(y)).sum(0)

    module = make_fx(compute)(X[0])
    assert remove_double_transpose(module.graph, PassOptions()) == 1
    module.recompile()
    whole, view, total = module(X[0])
    assert view is not whole
    torch.testing.assert_close((whole, view, total), compute(X[0]))


def test_transposes_of_a_scalar_are_removed():
    module = make_fx(lambda x: aten.transpose(aten.t(x * 2), 0, -1))(torch.tensor(3.0))
    assert remove_double_transpose(module.graph, PassOptions()) == 1
    module.recompile()
    assert module(torch.tensor(3.0)) == 6


def test_three_transposes_become_one():
    module = make_fx(lambda x: aten.t(aten.t(aten.t(x * 2))))(X[0])
    assert remove_double_transpose(module.graph, PassOptions()) == 1
    module.recompile()
    torch.testing.assert_close(module(X[0]), (X[0] * 2).T)
    assert transposes(module) == 1


def test_the_weight_gradient_of_a_linear_layer_has_no_transposes():
    module = make_fx(of_a_linear_layer)(torch.ones(2, 4))
    assert remove_double_transpose(module.graph, PassOptions()) >= 1
    module.recompile()
    torch.testing.assert_close(module(torch.ones(2, 4)), of_a_linear_layer(torch.ones(2, 4)))
