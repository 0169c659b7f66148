"""Floating point operations of matrix products, convolutions and attention, as formulas of the operands' shapes.

A product and an addition are two operations. `result` is the shape of the result.
"""

from __future__ import annotations

from math import prod
from typing import Any

Shape = tuple[int, ...]


def product(left: Shape, right: Shape, *_: object, **__: object) -> int:
    columns = right[-1] if len(right) > 1 else 1
    return 2 * prod(left) * columns


def product_and_sum(_added: Shape, left: Shape, right: Shape, *_: object, **__: object) -> int:
    return product(left, right)


def linear(rows: Shape, weight: Shape, *_: object, **__: object) -> int:
    return 2 * prod(rows) * (weight[0] if len(weight) > 1 else 1)


def linear_backward(rows: Shape, weight: Shape, *_: object, **__: object) -> int:
    return 2 * prod(rows) * weight[1]


def linear_4bit(rows: Shape, _packed: Shape, weight: Shape, *_: object, **__: object) -> int:
    return linear(rows, weight)


def linear_4bit_backward(rows: Shape, _packed: Shape, weight: Shape, *_: object, **__: object) -> int:
    return linear_backward(rows, weight)


def linear_cross_entropy(rows: Shape, weight: Shape, *more: Any, **_: object) -> int:
    """The scores, and the gradients of hidden states and weight that are wanted."""
    wanted = more[-1]
    return product(rows, weight[::-1]) * (1 + sum(map(int, wanted[:2])))


def linear_token_scores_backward(
    _grad: Shape, _entropy: Shape, rows: Shape, weight: Shape, *more: Any, **_: object
) -> int:
    """The scores once more, and the gradients that are wanted."""
    return linear_cross_entropy(rows, weight, *more)


def grouped_product(left: Shape, right: Shape, *_: object, **__: object) -> int:
    """Each group of rows is multiplied with its matrix; a group of columns belongs to one matrix only."""
    return product(left, right) // (left[0] if len(left) == 3 and len(right) == 2 else 1)


def grouped_product_backward(left: Shape, right: Shape, *_: object, **__: object) -> int:
    """The gradients of both sides each take as much as the forward."""
    return 2 * grouped_product(left, right)


def convolution(given: Shape, weight: Shape, *more: Any, result: Shape) -> int:
    transposed = more[4]
    return _convolution(given, weight, result, transposed)


def convolution_backward(incoming: Shape, given: Shape, weight: Shape, *more: Any, **_: object) -> int:
    """The gradients of input and weight each take as much as the forward."""
    transposed, wanted = more[4], more[7]
    return _convolution(given, weight, incoming, transposed) * sum(map(int, wanted[:2]))


def _convolution(given: Shape, weight: Shape, result: Shape, transposed: bool) -> int:
    """Each weight is used once for each pixel of the output, or of the input of a transposed convolution."""
    pixels = prod((given if transposed else result)[2:])
    return 2 * given[0] * pixels * prod(weight)


def attention(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    """The scores, and their product with the values."""
    return _attention(query, key[-2], query[-1] + value[-1])


def attention_backward(_incoming: Shape, query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    """The scores once more, the gradients of scores and values, and those of query and key."""
    return _attention(query, key[-2], 3 * query[-1] + 2 * value[-1])


def packed_attention(query: Shape, key: Shape, value: Shape, spans: Shape, *_: object, **__: object) -> int:
    """Sequences count as equally long: the operands' shapes do not tell the length of each."""
    return _attention(query, key[0] // max(spans[0], 1), query[-1] + value[-1])


def packed_attention_backward(_incoming: Shape, query: Shape, key: Shape, value: Shape, *more: Any, **_: object) -> int:
    spans = more[2]
    return _attention(query, key[0] // max(spans[0], 1), 3 * query[-1] + 2 * value[-1])


def _attention(query: Shape, keys: int, widths: int) -> int:
    """Products of each query with so many keys, of these widths in all."""
    return 2 * prod(query[:-1]) * keys * widths
