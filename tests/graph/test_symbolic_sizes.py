"""Sizes that are known only at run time are computed from the symbols, and only when they change."""

import sympy
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ort_accel.graph.symbolic_sizes import SizeFunction, SymbolSource, expression, hinted_elements, known_equal


def open_tensor(*shape):
    """A fake tensor whose sizes are all open."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    real = torch.zeros(shape)
    for dim in range(real.ndim):
        torch._dynamo.mark_dynamic(real, dim)
    return mode.from_tensor(real)


def test_a_fixed_size_is_a_plain_number():
    assert expression(7) == 7
    assert isinstance(expression(7), int)


def test_an_open_size_is_an_expression():
    fake = open_tensor(5, 9)
    assert isinstance(expression(fake.shape[0]), sympy.Symbol)
    assert {str(s) for s in expression(fake.shape[0] * fake.shape[1]).free_symbols} == {
        str(expression(size)) for size in fake.shape
    }


def test_sizes_follow_the_symbols():
    batch, length = sympy.symbols("s0 s1", integer=True, positive=True)
    sizes = SizeFunction([batch * length, 384, length - 1])
    assert sizes.symbols == ("s0", "s1")
    assert sizes({"s0": 8, "s1": 128}) == (1024, 384, 127)
    assert sizes({"s0": 3, "s1": 5}) == (15, 384, 4)


def test_unchanged_symbols_give_the_very_same_sizes():
    sizes = SizeFunction([sympy.Symbol("s0") * 2])
    assert sizes({"s0": 4}) is sizes({"s0": 4})
    assert sizes({"s0": 5}) == (10,)


def test_sizes_without_symbols_are_constant():
    assert SizeFunction([3, 4])({}) == (3, 4)
    assert SizeFunction([])({}) == ()


def test_divisions_are_those_of_python():
    fake = open_tensor(10, 3)
    sizes = SizeFunction([expression(fake.shape[0] // 3), expression(fake.shape[0] % 4)])
    symbol = str(expression(fake.shape[0]))
    assert sizes({symbol: 11}) == (11 // 3, 11 % 4)


def test_equality_is_claimed_only_where_it_always_holds():
    fake = open_tensor(6, 6)
    one = fake.shape[0]
    assert known_equal(one * 2, one + one)
    assert known_equal(4, 4)
    assert not known_equal(one, one + 1)
    assert not known_equal(one, 6)


def test_sizes_that_a_guard_makes_equal_are_equal():
    batch, length, rows, others = open_tensor(6, 7, 3, 14).shape
    first, second = batch * length, rows * others
    assert not known_equal(first, second)
    assert bool(first == second)  # adds the guard
    assert known_equal(first, second)
    assert not known_equal(batch, rows)


def test_elements_are_counted_at_the_sizes_of_the_capture():
    assert hinted_elements(open_tensor(6, 7)) == 42
    assert hinted_elements(torch.zeros(3, 0)) == 0


def test_symbols_are_read_from_sizes_and_from_numbers():
    fake = open_tensor(5, 9)
    source = SymbolSource()
    source.learn(0, fake.shape[0])
    source.learn(1, fake)
    values: dict[str, int] = {}
    source.read([5, torch.zeros(5, 9)], values)
    assert values == {str(expression(fake.shape[0])): 5, str(expression(fake.shape[1])): 9}
