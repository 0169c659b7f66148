"""Functions that are one cluster each, with the tensors of the capture and others, whose kernels tests run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.generated.traced import normal

functional = nn.functional
BF16, FP16, FP64 = torch.bfloat16, torch.float16, torch.float64


@dataclass(frozen=True)
class Case:
    """A cluster, and batches of tensors, the first of which is captured. If there are several, sizes are open."""

    function: Callable[..., Any]
    batches: Sequence[Sequence[Tensor]]

    @property
    def mode(self) -> str:
        return "symbolic" if len(self.batches) > 1 else "fake"


def whole(*shape: int, dtype: torch.dtype = torch.int64, high: int = 9) -> Tensor:
    """Whole numbers, the same for the same shape."""
    return torch.randint(-high, high, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def truth(*shape: int) -> Tensor:
    """Booleans, the same for the same shape."""
    return whole(*shape) > 0


def last(tensor: Tensor) -> Tensor:
    """The same tensor with its channels last in memory."""
    return tensor.contiguous(memory_format=torch.channels_last)


def chain(x: Tensor, y: Tensor) -> Tensor:
    return functional.gelu(x * y + 0.5) - x.abs().sqrt()


def normed(x: Tensor, w: Tensor) -> Sequence[Tensor]:
    """The results of a norm, and what is made of the first."""
    results = torch.native_layer_norm(x * 2, [x.shape[-1]], w, None, 1e-5)
    return *results, results[0].tanh() + x


def norm_gradients(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor) -> Sequence[Tensor | None]:
    return torch.ops.aten.native_layer_norm_backward(g * 2, x, [x.shape[-1]], mean, rstd, w, None, [True, True, False])[
        :2
    ]


def two_passes(x: Tensor) -> Tensor:
    """Each column needs the sum of the whole column, which lies in scratch memory."""
    weights = x.sin().sum(0)
    return (x - weights).exp() / (1 + weights.abs())


def several(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    inner = x * y
    return inner, inner.sum(-1), inner.amax(0), inner > 0, (inner + 1).to(torch.int32)


def joined(x: Tensor, y: Tensor) -> Tensor:
    return functional.pad(torch.cat([x.sin(), y], -1)[:, 1:], (2, 1)).flip(0) + torch.stack([x, y * 2], 1).sum()


def dropped(x: Tensor, mask: Tensor) -> Tensor:
    return x * mask * 1.25 + x.masked_fill(mask, 0.0)


CASES: dict[str, Case] = {
    "fp32": Case(chain, [(normal(64, 48), normal(64, 48))]),
    "odd sizes": Case(chain, [(normal(3, 7, 13), normal(7, 13))]),
    "one row": Case(chain, [(normal(1, 531), normal(1, 531))]),
    "bf16": Case(chain, [(normal(37, 53, dtype=BF16), normal(37, 53, dtype=BF16))]),
    "fp16": Case(chain, [(normal(37, 53, dtype=FP16), normal(37, 53, dtype=FP16))]),
    "fp64": Case(chain, [(normal(17, 5, dtype=FP64), normal(17, 5, dtype=FP64))]),
    "int64": Case(
        lambda x, y: (x * 3 + y) % 5 - torch.div(x, y * y + 1, rounding_mode="floor"), [(whole(33, 9), whole(33, 9))]
    ),
    "bool": Case(lambda x, y: (x & ~y) | (y ^ x), [(truth(33, 17), truth(33, 17))]),
    "types": Case(lambda x, y: (x.to(BF16) * y).float() + (x > 0), [(normal(29, 31), normal(29, 31, dtype=BF16))]),
    "types for a result in 16 bits": Case(
        lambda x, y: (x.to(BF16) * y + 1).tanh(), [(normal(29, 31), normal(29, 31, dtype=BF16))]
    ),
    "comparison in bf16": Case(
        lambda x, y: (x * 1.7 + y) > y * 1.3, [(normal(29, 31, dtype=BF16), normal(29, 31, dtype=BF16))]
    ),
    "norm of bf16": Case(
        lambda x, w: functional.layer_norm((x * 0.9 + x.tanh()).float(), (40,), w),
        [(normal(n, 40, dtype=BF16), normal(40)) for n in (12, 33)],
    ),
    "mask": Case(dropped, [(normal(19, 23), truth(19, 23))]),
    "open sizes": Case(
        chain, [(normal(n, k), normal(n, k)) for n, k in [(40, 24), (41, 25), (3, 5), (130, 2), (2, 777)]]
    ),
    "open sizes in bf16": Case(
        lambda x: x.softmax(-1) * x.shape[0], [(normal(n, k, dtype=BF16),) for n, k in [(40, 24), (7, 131), (300, 2)]]
    ),
    "transposed input": Case(lambda x, y: (x.t() * y).exp(), [(normal(n, 21), normal(21, n)) for n in (13, 50, 3)]),
    "transposed memory": Case(lambda x: (x * 2).sin() + x, [(normal(24, n).t(),) for n in (40, 7, 90)]),
    "transposed output": Case(
        lambda x, y: (x.t() * y.t()).tanh() + 1, [(normal(15, n), normal(15, n)) for n in (9, 44)]
    ),
    "a part of the input": Case(lambda x: x[1:, ::2].sin() * x[:-1, 1::2], [(normal(n, 12),) for n in (9, 30)]),
    "an input with gaps": Case(lambda x: x.sin() * 2, [(normal(14, 2 * n)[::2, 1 : n + 1],) for n in (20, 33)]),
    "an expanded input": Case(lambda x, y: x.sin() * 2 + y, [(normal(1, 20).expand(14, 20), normal(14, 20))]),
    "channels last": Case(
        lambda x, w: (x * w[:, None, None]).relu() + x,
        [(last(normal(2, 6, *hw)), normal(6)) for hw in [(5, 7), (8, 8), (3, 20)]],
    ),
    "channels last from channels first": Case(
        lambda x, y: last(x.sigmoid()) * y, [(normal(2, 6, 5, 7), last(normal(2, 6, 5, 7)))]
    ),
    "channels first from channels last": Case(
        lambda x: x.permute(0, 2, 3, 1).contiguous().sin() + 1, [(normal(2, 6, 5, n),) for n in (7, 12)]
    ),
    "norm": Case(normed, [(normal(n, 40), normal(40)) for n in (12, 33)]),
    "gradients of a norm": Case(
        norm_gradients, [(normal(n, 40), normal(n, 40), normal(n, 1), normal(n, 1).abs(), normal(40)) for n in (12, 33)]
    ),
    "logarithm of a softmax": Case(lambda x: (x * 2).log_softmax(-1).sum(), [(normal(n, 50),) for n in (21, 64)]),
    "variance": Case(lambda x: torch.var_mean(x * 3, [1], keepdim=True), [(normal(n, 50),) for n in (21, 64)]),
    "scratch memory": Case(two_passes, [(normal(n, 30),) for n in (25, 60)]),
    "several results": Case(several, [(normal(n, 18), normal(n, 18)) for n in (16, 35)]),
    "joined": Case(joined, [(normal(6, 10), normal(6, 10))]),
    "constants": Case(
        lambda x: x * torch.arange(x.shape[1], dtype=x.dtype) + torch.full_like(x, 2.0).exp(),
        [(normal(n, k),) for n, k in [(6, 11), (15, 8)]],
    ),
    "infinities": Case(lambda x: x / 0.0 + x.log(), [(normal(11, 13),)]),
}
