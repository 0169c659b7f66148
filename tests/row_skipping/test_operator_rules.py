"""Row-by-row operators pass on which rows are read; operators that mix rows read all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ort_accel.kernels.gated import gated
from ort_accel.kernels.rms_norm import rms_norm
from ort_accel.kernels.rotary import rotary
from tests.row_skipping.rewritten import Rewritten, assert_as_eager

WIDTH = 6

Layer = Callable[["Layers", Tensor], Tensor]


class Layers(nn.Module):
    """A layer on [rows, length, width], followed by a loss whose labels select rows."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))
        self._layer = layer

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self._layer(self, self.first(x))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def batch(rows: int, length: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows + length)
    labels = torch.randint(0, WIDTH, (rows, length))
    return torch.randn(rows, length, WIDTH), labels.masked_fill(torch.rand(rows, length) < 0.6, -100)


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], WIDTH // 2, 2)


def angles(places: int, width: int) -> tuple[Tensor, Tensor]:
    table = torch.arange(1, places + 1)[:, None] * torch.arange(1, width + 1)
    return table.cos(), table.sin()


APART: dict[str, Layer] = {
    "linear": lambda m, x: m.second(x),
    "matmul": lambda m, x: x @ m.second.weight,
    "mm": lambda m, x: torch.mm(x.flatten(0, 1), m.second.weight).unflatten(0, x.shape[:2]),
    "addmm": lambda m, x: torch.addmm(m.scale, x.flatten(0, 1), m.second.weight).unflatten(0, x.shape[:2]),
    "layer norm": lambda m, x: F.layer_norm(x, (WIDTH,), m.scale),
    "rms norm": lambda m, x: F.rms_norm(x, (WIDTH,), m.scale),
    "fused rms norm": lambda m, x: rms_norm(x, m.scale, 1e-5),
    "gate": lambda m, x: gated(x, m.second(x), "silu"),
    "rotary embedding": lambda m, x: rotary(x, *angles(x.shape[1], WIDTH)),
    "rotary embedding of heads": lambda m, x: (
        rotary(heads(x).transpose(1, 2), *angles(x.shape[1], 2)).transpose(1, 2).flatten(2)
    ),
    "softmax": lambda m, x: x.softmax(-1),
    "cumsum over width": lambda m, x: x.cumsum(-1),
    "gated": lambda m, x: torch.cat([F.glu(x), F.glu(x.sin())], -1),
    "silu and scale": lambda m, x: F.silu(x) * m.scale + 1,
    "one number for each row": lambda m, x: x * torch.arange(x.shape[0])[:, None, None],
    "one number for each place": lambda m, x: x + torch.arange(x.shape[1])[:, None] * 0.1,
    "one number for each place, wide": lambda m, x: x + torch.arange(x.shape[1] * WIDTH).view(1, -1, WIDTH) * 0.1,
    "a single number": lambda m, x: x / m.scale.norm().clamp(min=0.1).view(1, 1, 1),
    "a place of the width for each row": lambda m, x: x + x.gather(-1, x.argmax(-1, keepdim=True)),
    "places of the width for each row": lambda m, x: x + x.gather(2, (x > 0).long()),
    "a place for each row, flattened": lambda m, x: (
        x + (y := x.flatten(0, 1)).gather(1, y.argmax(1)[:, None]).view(*x.shape[:2], 1)
    ),
    "places of the width": lambda m, x: x[..., [5, 4, 3, 2, -1, -6]],
    "where": lambda m, x: torch.where(x > 0, x, 0.1 * x),
    "masked fill": lambda m, x: x.masked_fill(x < 0, 0.5),
    "mean over width": lambda m, x: x - x.mean(-1, keepdim=True),
    "variance over width": lambda m, x: x / (x.var(-1, keepdim=True) + 1),
    "variance over a middle dimension": lambda m, x: (lambda y: y / (y.var(1, keepdim=True) + 1))(
        x.transpose(1, 2)
    ).transpose(1, 2),
    "largest": lambda m, x: x / (x.amax(-1, keepdim=True).abs() + 1) + x.logsumexp(-1).unsqueeze(-1),
    "heads": lambda m, x: x.view(*x.shape[:2], 2, 3).transpose(1, 2).sin().transpose(1, 2).flatten(2),
    "split": lambda m, x: torch.cat(x.split([2, 4], -1)[::-1], -1),
    "chunk": lambda m, x: torch.cat([part.cos() for part in x.chunk(2, -1)], -1),
    "unbind": lambda m, x: torch.stack(x.unbind(-1)[::-1], -1),
    "part of the width": lambda m, x: torch.cat([x[..., 1:], x[..., :1].exp()], -1),
    "one of the width": lambda m, x: x + x[..., 2].unsqueeze(-1),
    "expanded": lambda m, x: x[..., :1].expand(-1, -1, WIDTH) + x,
    "flattened": lambda m, x: m.second(x.reshape(-1, WIDTH)).view(x.shape[0], -1, WIDTH),
    "viewed as another": lambda m, x: m.second(x.flatten(0, 1)).view_as(x).reshape_as(x),
    "another type": lambda m, x: x.double().contiguous().type_as(m.scale),
    "the type of what came before": lambda m, x: m.second(x.double().square().type_as(x)),
    "behind a cache that is empty": lambda m, x: torch.cat([torch.tensor([]), x.sin()], -2),
    "beside nothing": lambda m, x: torch.cat([x.sin(), x[..., WIDTH:]], -1),
    "parts beside nothing": lambda m, x: torch.cat([x[..., :2].sin(), x[..., WIDTH:], x[..., 2:].cos()], -1),
    "a copy in another order": lambda m, x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "detached beside": lambda m, x: x + x.detach().square(),
    "the largest two, and where": lambda m, x: x.scatter(-1, x.topk(2, -1).indices, -x.topk(2).values),
    "places that are set": lambda m, x: x.masked_fill(
        torch.zeros_like(x).scatter_(-1, x.topk(2, sorted=False).indices, 1) > 0, 0.5
    ),
    "constants": lambda m, x: x * torch.full_like(x, 2.0) + torch.ones_like(x, dtype=torch.float64).float(),
    "an outer dimension": lambda m, x: (x[:, :, None] * m.scale[:, None]).sum(2),
}

MIXING: dict[str, Layer] = {
    "cumsum over places": lambda m, x: x.cumsum(1),
    "mean over places": lambda m, x: x - x.mean(1, keepdim=True),
    "mean over rows": lambda m, x: x - x.mean(0, keepdim=True),
    "norm over all": lambda m, x: x / x.norm(),
    "softmax over places": lambda m, x: x.softmax(1),
    "rolled": lambda m, x: x + x.roll(1, 1),
    "reversed": lambda m, x: x + x.flip(0),
    "sorted": lambda m, x: x.sort(1).values,
    "the largest place": lambda m, x: x + x.topk(1, 1).values,
    "written to places": lambda m, x: x.scatter(1, x.argmax(1, keepdim=True), 0.5),
    "convolution": lambda m, x: F.conv1d(x.transpose(1, 2), m.second.weight[..., None]).transpose(1, 2),
    "attention by hand": lambda m, x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "taken twice": lambda m, x: x[:, torch.zeros(x.shape[1], dtype=torch.long)] + x,
    "width and places joined": lambda m, x: x.flatten(1).unflatten(1, (WIDTH, -1)).transpose(1, 2).sin(),
    "rotary embedding along places": lambda m, x: rotary(x.transpose(1, 2), *angles(WIDTH, x.shape[1])).transpose(1, 2),
    "rows in another order": lambda m, x: m.second(x.transpose(0, 1)).transpose(0, 1),
    "changed in place": lambda m, x: x.clone().index_fill_(1, torch.tensor([0]), 0.0),
}


@pytest.mark.parametrize("name", APART)
def test_a_row_by_row_operator_is_computed_for_labelled_rows(name: str) -> None:
    ours = compared(APART[name])
    assert ours.ran == {"some rows": 2}
    assert calls(ours, "rows_into") == 0, "nothing is made for all rows again"
    assert all(product_rows(ours)), "every product has the labelled rows only"


@pytest.mark.parametrize("name", MIXING)
def test_an_operator_that_mixes_rows_is_computed_for_all(name: str) -> None:
    assert not all(product_rows(compared(MIXING[name])))


def test_rows_packed_under_no_grad_do_not_lose_later_gradients() -> None:
    def twice(m: Layers, x: Tensor) -> Tensor:
        mixed = x.roll(1, 1)
        with torch.no_grad():
            start = m.second(mixed)
        return m.second(mixed) + start

    assert compared(twice).ran == {"some rows": 2}


def compared(layer: Layer) -> Rewritten:
    module = Layers(layer)
    ours = Rewritten(module)
    for rows, length in [(3, 7), (4, 9)]:
        assert_as_eager(module, ours, *batch(rows, length))
    return ours


def calls(ours: Rewritten, name: str) -> int:
    return sum(name in str(node.target) for node in ours.graph.nodes)


def product_rows(ours: Rewritten) -> list[bool]:
    """Returns, for each product with a weight, True if its row count is a size that no input has."""
    nodes = [n for n in ours.graph.nodes if any(part in str(n.target) for part in ("linear", "mm", "conv"))]
    return [node.meta["val"].shape[0] == LABELLED for node in nodes]


LABELLED = int((batch(3, 7)[1] != -100).sum())
"""In the batch that the graph is written for; neither it nor its sizes have this number otherwise."""


def test_the_batch_tells_labelled_rows_from_others() -> None:
    assert LABELLED not in {3, 7, 21, WIDTH}


class TwoLosses(nn.Module):
    """One for tokens and one for whole rows, which read the same values along other dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, labels: Tensor, classes: Tensor) -> Tensor:
        hidden = self.first(x)
        one, other = self.second(hidden).sin().chunk(2, -1)
        of_tokens = F.cross_entropy(torch.cat([one, other], -1).flatten(0, 1), labels.flatten())
        of_rows = hidden.exp().sum(1) + one.sum(1).sum(1, keepdim=True) + other[:, 1:].sum(1).sum(1, keepdim=True)
        return of_tokens + F.cross_entropy(of_rows, classes)


def test_a_value_that_is_read_for_tokens_and_for_whole_rows() -> None:
    module = TwoLosses()
    ours = Rewritten(module)
    for rows, length in [(3, 7), (4, 9)]:
        classes = torch.randint(0, WIDTH, (rows,)).index_fill(0, torch.tensor([1]), -100)
        assert_as_eager(module, ours, *batch(rows, length), classes)
    assert ours.ran == {"some rows": 2}
