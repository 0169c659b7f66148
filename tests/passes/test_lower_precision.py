"""Operators that are allowed to compute in autocast's smaller type; the error stays that of one rounding to it."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import ort_accel
from ort_accel.config.sections.precision import CastPropagation
from ort_accel.errors import ConfigError
from ort_accel.passes.common import CAST
from ort_accel.passes.lower_precision import MOVABLE, lower_precision
from ort_accel.passes.options import PassOptions
from ort_accel.passes.remove_redundant_casts import remove_redundant_casts

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STRATEGIES = ["flood_fill", "insert_and_reduce"]
X = torch.linspace(-3, 3, 24).reshape(4, 6)


def moved(function, *inputs, allow=(), strategy="flood_fill"):
    """The graph after moving, how many were moved, and the types that each operator gives."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    options = PassOptions(casts=CastPropagation(level=2, allow=allow, strategy=strategy))
    count = lower_precision(module.graph, options)
    remove_redundant_casts(module.graph, PassOptions())
    module.graph.lint()
    module.recompile()
    results = module(*inputs)
    expected = function(*inputs)
    assert [item.dtype for item in results] == [item.dtype for item in expected]
    for given, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(given, wanted, rtol=2**-7, atol=2**-7)
    types = {
        node.target.overloadpacket.__name__: node.meta["val"].dtype
        for node in module.graph.nodes
        if node.op == "call_function" and node.target is not CAST
    }
    return count, types, len(module.graph.find_nodes(op="call_function", target=CAST))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_operator_between_16_bit_operators_computes_in_16_bits(strategy):
    def function(x):
        return [torch.nn.functional.gelu((x @ x.t()).float()).to(BF16) @ x]

    count, types, casts = moved(function, X[:, :4].to(BF16), allow=("Gelu",), strategy=strategy)
    assert (count, types["gelu"], casts) == (1, BF16, 0)


def test_operators_that_are_not_allowed_stay_in_float32():
    def function(x):
        return [torch.nn.functional.gelu(x.float()).softmax(-1).to(BF16)]

    assert moved(function, X.to(BF16), allow=("Gelu",))[1] == {"gelu": BF16, "_softmax": F32}
    assert moved(function, X.to(BF16), allow=("Softmax",))[1] == {"gelu": F32, "_softmax": BF16}
    assert moved(function, X.to(BF16))[1] == {"gelu": F32, "_softmax": F32}


def test_flood_fill_moves_whole_chains_of_operators():
    def function(x):
        wide = x.float()
        return [torch.relu(torch.tanh(wide.neg())).to(BF16).sin()]

    count, types, casts = moved(function, X.to(BF16), allow=("Neg", "Tanh", "Relu"))
    assert (count, casts) == (3, 0)
    assert set(types.values()) == {BF16}


def test_flood_fill_also_moves_operators_before_a_cast():
    def function(x):
        return [torch.tanh(x).t().to(F16).sin()]

    assert moved(function, X, allow=("Tanh",))[1]["tanh"] == F16


def test_only_insert_and_reduce_moves_operators_with_float32_inputs():
    def function(x, y):
        return [x.to(BF16).sin(), torch.tanh(y).sum(0)]

    assert moved(function, X, X, allow=("Tanh",))[1]["tanh"] == F32
    assert moved(function, X, X, allow=("Tanh",), strategy="insert_and_reduce")[1]["tanh"] == BF16


def test_an_operator_with_one_float32_input_stays_in_float32():
    def function(x, y):
        return [(x.float() + y).sum(0)]

    count, types, _ = moved(function, X.to(BF16), X, allow=("Add",))
    assert (count, types["add"]) == (0, F32)


def test_without_autocast_nothing_moves():
    assert moved(lambda x: [torch.tanh(x)], X, allow=("Tanh",), strategy="insert_and_reduce")[0] == 0


def test_clones_always_move_and_keep_every_bit():
    def function(x):
        return [x.float().t().clone(memory_format=torch.contiguous_format).to(BF16).sin()]

    module = make_fx(function, tracing_mode="fake")(X.to(BF16))
    assert lower_precision(module.graph, PassOptions(casts=CastPropagation(level=2))) == 1
    remove_redundant_casts(module.graph, PassOptions())
    module.recompile()
    assert torch.equal(module(X.to(BF16))[0], function(X.to(BF16))[0])
    assert not module.graph.find_nodes(op="call_function", target=CAST)


def single(x):
    return x.to(torch.promote_types(x.dtype, F32))


class Net(nn.Module):
    """Under autocast: products in 16 bits, and between them what its writer put into single precision."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        wide = torch.nn.functional.gelu(single(self.up(x)))
        return (single(self.down(torch.softmax(wide, -1) * 8)) ** 2).mean()


def gradients(model, *inputs, dtype=None):
    model.zero_grad()
    with torch.autocast("cpu", dtype or BF16, enabled=dtype is not None):
        loss = model(*inputs)
    loss.backward()
    return torch.cat([loss.detach().double().reshape(1), *(p.grad.double().flatten() for p in model.parameters())])


@pytest.mark.parametrize(("strategy", "dtype"), list(itertools.product(STRATEGIES, [BF16, F16])), ids=str)
def test_the_error_of_a_step_is_that_of_eager_autocast(strategy, dtype):
    torch.manual_seed(0)
    eager, x = Net(), torch.randn(64, 16)
    exact = gradients(copy.deepcopy(eager).double(), x.double())
    own = (gradients(eager, x, dtype=dtype) - exact).norm() / exact.norm()
    wish = {"level": 2, "allow": ["Gelu", "Softmax", "Mul"], "strategy": strategy}
    ours = ort_accel.accelerate(copy.deepcopy(eager), {"precision": {"cast_propagation": wish}})
    off = (gradients(ours, x, dtype=dtype) - exact).norm() / exact.norm()
    assert off < 3 * own
    report = ort_accel.report(ours)
    assert report.counters["operators moved into the smaller type"] >= 4  # both directions
    assert f"Gelu, Softmax, Mul in the smaller type ({strategy})" in (
        report.features["precision.cast_propagation.level"].effect
    )


@pytest.mark.parametrize("name", ["LayerNormalization", "ReduceMean", "Exp"])
def test_operators_that_must_compute_in_float32_cannot_be_allowed(name):
    with pytest.raises(ConfigError, match=rf"allow: {name} cannot be moved into the smaller type; allowed are Add, "):
        ort_accel.accelerate(Net(), {"precision": {"cast_propagation": {"level": 2, "allow": [name]}}})


@pytest.mark.parametrize("name", MOVABLE)
def test_every_movable_operator_is_elementwise_or_a_product_or_a_softmax(name):
    heavy = {"mm", "bmm", "addmm", "baddbmm", "_softmax", "_safe_softmax", "_softmax_backward_data"}
    for target in MOVABLE[name]:
        is_elementwise = torch.Tag.pointwise in target.tags or "backward" in str(target)
        assert is_elementwise or target.overloadpacket.__name__ in heavy
