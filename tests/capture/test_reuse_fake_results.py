"""What Dynamo has computed is not computed again, and a trace is what it would be if it were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from ort_accel.capture.forward_graph import Tracer
from ort_accel.capture.reuse_fake_results import ReusingInterpreter
from tests.capture.test_forward_graph import captured

WEIGHT, BIAS = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], -1, 4).transpose(1, 2)


def block(x: Tensor, mask: Tensor) -> Tensor:
    """What a layer of a language model does, with whole operators and with small ones."""
    query, key, value = (heads(functional.linear(x, WEIGHT, bias)) for bias in (BIAS, None, BIAS))
    wide = mask[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
    rotated = torch.cat((-query[..., 2:], query[..., :2]), -1) * 0.5 + query
    ways = [
        functional.scaled_dot_product_attention(rotated, key, value, attn_mask=wide, dropout_p=0.1),
        functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3),
        functional.scaled_dot_product_attention(query, key[:, :1], value[:, :1], enable_gqa=True),
        (query @ key.mT).softmax(-1) @ value,
    ]
    read = torch.where(mask[..., None], sum(ways).transpose(1, 2).reshape(x.shape).contiguous(), torch.tensor(0.0))
    found = functional.layer_norm(functional.dropout(read, 0.1), (8,), WEIGHT[0], BIAS, 1e-6)
    return functional.gelu(found, approximate="tanh") + found * torch.rsqrt(found.pow(2).mean(-1, keepdim=True) + 1)


def names(ids: Tensor) -> Tensor:
    return functional.embedding(ids, WEIGHT, padding_idx=1).permute(1, 0, 2)


def changes(x: Tensor) -> tuple[Tensor, ...]:
    """In-place writing, also of sizes; tensors that come out as they went in; sizes of what is computed."""
    written, turned = functional.linear(x, WEIGHT), functional.linear(x[0], WEIGHT)
    turned.t_()
    written.view(-1).mul_(2)
    written += 1
    same = functional.dropout(x, training=False).contiguous()
    places = torch.arange(same.shape[1]) + written.size(0) * written.stride(0)
    return functional.gelu(written), turned + 1, same.add_(x.numel()), places, torch.tensor(2.0) * torch.tensor(3.0)


def cast_within(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.linear(x, WEIGHT, BIAS).softmax(-1) @ x.mT


def not_cast_within(x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return functional.linear(x, WEIGHT, BIAS).softmax(-1) @ x.mT


CASES: dict[str, tuple[Callable[..., Any], list[Tensor], int]] = {
    "a layer of a language model": (block, [torch.randn(3, 5, 8), torch.ones(3, 5, dtype=torch.bool)], 30),
    "embeddings": (names, [torch.ones(3, 5, dtype=torch.long)], 2),
    "tensors that change": (changes, [torch.randn(3, 5, 8)], 1),
    "autocast": (cast_within, [torch.randn(3, 5, 8)], 0),
    "no autocast": (not_cast_within, [torch.randn(3, 5, 8)], 3),
}


def described(graph: fx.Graph) -> list[Any]:
    """The nodes, by number: names count operators that are not kept."""
    numbers = {node: f"%{number}" for number, node in enumerate(graph.nodes)}
    return [
        (str(node.target), fx.map_arg((node.args, node.kwargs), numbers.get), node.meta.get("stack_trace"), _form(node))
        for node in graph.nodes
    ]


def _form(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return str(value)
    numbers = str([*value.shape, *value.stride(), value.storage_offset()])
    return type(value), numbers, value.dtype, value.device, value.requires_grad


@pytest.mark.parametrize("cast", [False, True], ids=["", "under autocast"])
@pytest.mark.parametrize("dynamic", [True, False], ids=["open sizes", "fixed sizes"])
@pytest.mark.parametrize("case", CASES)
def test_a_trace_is_the_same_with_what_is_known(
    case: str, dynamic: bool, cast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, inputs, least = CASES[case]
    known, taken = ReusingInterpreter._known_result, []

    def noted(self: ReusingInterpreter, op: Any) -> Any:
        result = known(self, op)
        taken.extend([op] if result is not None else [])
        return result

    def look(module: fx.GraphModule, tracer: Tracer) -> None:
        monkeypatch.setattr(ReusingInterpreter, "_known_result", noted)
        short = described(tracer.trace(module).graph)
        monkeypatch.setattr(ReusingInterpreter, "_known_result", lambda *_: None)
        assert short == described(tracer.trace(module).graph)

    with torch.autocast("cpu", torch.bfloat16, cast):
        captured(function, *inputs, look=look, dynamic=dynamic)
    has_other_types = case == "autocast" or (cast and case == "no autocast")
    assert not taken if has_other_types else len(taken) >= least
