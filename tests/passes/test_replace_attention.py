"""Attention in place of PyTorch's, without repeated keys and needless masks, gives what PyTorch's gives with them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import ort_accel
from ort_accel.kernels import attention_slim
from ort_accel.kernels.attention_precision import FLASH_BACKWARD, FLASH_FORWARD, additive_mask, in_faster_type
from ort_accel.kernels.attention_slim import SLIM_BACKWARD, SLIM_FORWARD
from tests.tiers import mostly_long

COUNTER = "fused attention"
BATCH, HEADS, TOKENS = 3, 6, 9

LOWER = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def padded():
    mask = LOWER.expand(BATCH, 1, TOKENS, TOKENS).clone()
    mask[0, ..., :3] = False
    mask[0, :, :3] = True  # queries that are padding look at something, as transformers has it
    return mask


def one_other():
    mask = LOWER.expand(BATCH, 1, TOKENS, TOKENS).clone()
    mask[2, 0, 5, 1] = False
    return mask


MASKS = {
    "causal": (LOWER.expand(BATCH, 1, TOKENS, TOKENS), True, False),
    "causal, a copy for each": (LOWER.expand(BATCH, 1, TOKENS, TOKENS).clone(), True, False),
    "causal for all": (LOWER[None, None], True, False),
    "causal, two dimensions": (LOWER, True, False),
    "everything": (torch.ones(BATCH, 1, 1, TOKENS, dtype=torch.bool).expand(-1, -1, TOKENS, -1), False, False),
    "padded": (padded(), False, True),
    "one pair less in the last sequence": (one_other(), False, True),
    "one pair more": (LOWER | torch.eye(TOKENS, dtype=torch.bool).roll(1, 1), False, True),
    "a window": ((LOWER & ~LOWER.tril(-4)).expand(BATCH, 1, TOKENS, TOKENS), False, True),
    "a query that sees nothing": ((LOWER & (torch.arange(TOKENS) != 4)[:, None])[None, None], False, True),
    "only the first key": ((torch.arange(TOKENS) < 1).expand(1, 1, TOKENS, TOKENS), False, True),
}
"""A mask, whether the kernel is told that it is causal, and whether it is given the mask."""


@pytest.fixture
def told(monkeypatch):
    """What the kernels are told: whether they are causal, whether they are given a mask, and the heads of the keys."""
    found, known = [], attention_slim._masking

    def noted(*given):
        how = known(*given)
        found.append((how[1], how[0] is not None, given[3].shape[1]))
        return how

    monkeypatch.setattr(attention_slim, "_masking", noted)
    return found


def operands(key_heads, dtype, tokens=TOKENS):
    torch.manual_seed(0)
    shapes = [(BATCH, heads, tokens, 8) for heads in (HEADS, key_heads, key_heads, HEADS)]
    return [torch.randn(*shape, dtype=dtype) for shape in shapes]


def repeated(keys):
    return keys.repeat_interleave(HEADS // keys.shape[1], dim=1)


def summed(grad, heads):
    return grad.unflatten(1, (heads, -1)).sum(2)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("key_heads", [1, 2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_results_equal_those_with_the_mask(name, key_heads, dtype, told):
    mask, causal, given = MASKS[name]
    query, key, value, grad = operands(key_heads, dtype)
    out, sums = SLIM_FORWARD(query, key, value, mask, False, 0.3)
    grads = SLIM_BACKWARD(grad, query, key, value, out, sums, mask, False, 0.3)
    assert told == [(causal, given, key_heads)] * 2

    wide = [each.double() for each in (query, repeated(key), repeated(value), grad)]
    whole = additive_mask(mask.expand(BATCH, 1, TOKENS, TOKENS), torch.float64)
    expected, whole_sums = FLASH_FORWARD(*wide[:3], attn_mask=whole, scale=0.3)
    expected_grads = FLASH_BACKWARD(wide[3], *wide[:3], expected, whole_sums, 0.0, False, attn_mask=whole, scale=0.3)
    tolerance = {"rtol": 0, "atol": 40 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out.double(), expected, equal_nan=True, **tolerance)
    assert out.dtype == dtype
    for each, one, heads in zip(grads, expected_grads, (HEADS, key_heads, key_heads), strict=True):
        assert each.dtype == dtype
        torch.testing.assert_close(each.double(), summed(one, heads), equal_nan=True, **tolerance)


@pytest.mark.parametrize("seen", [True, False])
def test_sequences_of_one_token_equal_those_with_the_mask(seen):
    query, key, value, _ = operands(2, torch.float32, tokens=1)
    mask = torch.full((1, 1, 1, 1), seen)
    out, _ = SLIM_FORWARD(query, key, value, mask, False, None)
    expected = functional.scaled_dot_product_attention(query, repeated(key), repeated(value), attn_mask=mask)
    torch.testing.assert_close(out, expected, equal_nan=True)


def test_attention_with_fewer_queries_than_keys_is_not_causal():
    query, key, value, _ = operands(2, torch.float32)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[:4]
    out, _ = SLIM_FORWARD(query[:, :, :4], key, value, mask, False, None)
    expected = functional.scaled_dot_product_attention(query[:, :, :4], repeated(key), repeated(value), attn_mask=mask)
    torch.testing.assert_close(out, expected)


def llama(key_heads=2, layers=2):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=48,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=key_heads,
        intermediate_size=32,
    )
    return LlamaForCausalLM(config)


def step(model, **batch):
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


WHOLE = {"density": {"labels": False, "padding": False}, "compute": {"upstream": False}}
"""All rows of all batches, so that one graph sees every mask."""


def batches(tokens):
    ids = torch.randint(1, 50, (3, tokens))
    ones = torch.ones_like(ids)
    right, left = ones.clone(), ones.clone()
    right[0, -2:] = 0
    left[1, :3] = 0
    two = torch.arange(tokens).expand(3, -1).clone()
    two[:, tokens // 2 :] -= tokens // 2  # two sequences in one row
    yield {"input_ids": ids, "labels": ids, "position_ids": two}
    for mask in (ones, right, left):
        yield {"input_ids": ids, "labels": ids, "attention_mask": mask}


@pytest.mark.parametrize(("key_heads", "layers"), mostly_long([(2, 1), (6, 2)], (2, 1)))
def test_one_graph_serves_all_masks_of_a_model(key_heads, layers):
    eager = llama(key_heads, layers)
    ours = ort_accel.accelerate(copy.deepcopy(eager), WHOLE)
    torch.manual_seed(1)
    for tokens in (10, 14, 11, 17):
        for batch in batches(tokens):
            for mine, expected in zip(step(ours, **batch), step(eager, **batch), strict=True):
                torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)
        if tokens == 14:
            compiled = ort_accel.report(ours).counters["compilations"]
    counters = ort_accel.report(ours).counters
    assert counters["compilations"] == compiled
    assert counters[COUNTER] == layers * compiled // 2  # each layer of each pair of graphs


def test_a_mask_that_changes_in_place_takes_effect():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(8, 24)
            self.register_buffer("mask", LOWER.clone())

        def forward(self, x):
            heads = self.project(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
            return functional.scaled_dot_product_attention(*heads, attn_mask=self.mask)

    eager = Attends()
    ours = ort_accel.accelerate(copy.deepcopy(eager))
    x = torch.randn(2, TOKENS, 8)
    torch.testing.assert_close(ours(x), eager(x))
    for model in (eager, ours):
        model.mask.data[6, 2] = False
    torch.testing.assert_close(ours(x), eager(x))
    assert ort_accel.report(ours).counters[COUNTER]


class Grouped(nn.Module):
    """Repeats keys as models do; `reads` also uses the repeated ones."""

    def __init__(self, reads: bool):
        super().__init__()
        self.project = nn.Linear(8, 16)
        self.reads = reads

    def forward(self, x):
        query, key, value = self.project(x).view(*x.shape[:2], 4, 4).transpose(1, 2).split([2, 1, 1], 1)
        key, value = (item[:, :, None].expand(-1, 1, 2, -1, -1).reshape(query.shape) for item in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True).square().mean()
        return mixed + key[:, 1].exp().mean() if self.reads else mixed


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("fusions", ["auto", False])
def test_repeated_keys_stay_only_for_other_readers(reads, fusions, told):
    eager = Grouped(reads)
    ours = ort_accel.accelerate(copy.deepcopy(eager), {"compute": {"fusions": fusions}})
    x = torch.randn(2, 5, 8)
    for model in (eager, ours):
        model(x).backward()
    torch.testing.assert_close(ours.project.weight.grad, eager.project.weight.grad)
    assert ort_accel.report(ours).counters[COUNTER] == 1
    assert {heads for *_, heads in told} == ({2} if reads else {1})


def test_a_mask_of_other_numbers_is_added():
    class Biased(nn.Module):
        def forward(self, query, key, value, bias):
            mask = torch.where(LOWER, bias, -torch.inf)
            return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    ours, bias = ort_accel.accelerate(Biased()), torch.randn(TOKENS, TOKENS)
    query, key, value, _ = operands(HEADS, torch.float32)
    torch.testing.assert_close(ours(query, key, value, bias), Biased()(query, key, value, bias))
    assert ort_accel.report(ours).counters[COUNTER] == 1


class Attention(nn.Module):
    def __init__(self, dtype: torch.dtype, causal: bool) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.dtype, self.causal = dtype, causal

    def forward(self, x, mask=None):
        batch, tokens, width = x.shape
        heads = self.project(x).to(self.dtype).view(batch, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=self.causal)
        return mixed.transpose(1, 2).reshape(batch, tokens, width).float().square().mean()


def gradient(model, x, mask):
    model.zero_grad()
    loss = model(x, mask)
    loss.backward()
    return loss.detach(), model.project.weight.grad.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", mostly_long(["causal", "mask", "bool mask"], "mask"))
def test_results_are_at_least_as_precise_as_in_eager_mode(dtype, case):
    torch.manual_seed(0)
    eager = Attention(dtype, causal=case == "causal")
    precise = Attention(torch.float64, causal=case == "causal")
    precise.load_state_dict(eager.state_dict())
    ours = ort_accel.accelerate(copy.deepcopy(eager), {"engine": {"fallback": "report"}})
    for tokens in (9, 12):
        x = torch.randn(3, tokens, 16)
        visible = torch.rand(3, 1, tokens, tokens) > 0.3
        visible[..., 0] = True
        mask = {"mask": torch.randn(3, 1, tokens, tokens).to(dtype), "bool mask": visible}.get(case)
        wide = mask.double() if case == "mask" else mask
        right, given, expected = gradient(precise, x, wide), gradient(ours, x, mask), gradient(eager, x, mask)
        assert given[1].dtype == expected[1].dtype
        torch.testing.assert_close(given[0], expected[0], rtol=4 * torch.finfo(dtype).eps, atol=0)
        error, allowed = ((one[1] - right[1]).norm() for one in (given, expected))
        assert error <= 1.2 * allowed + 1e-6
    counters = ort_accel.report(ours).counters
    assert counters["compilations"] in (2, 4)  # for open sizes, and mostly for the first ones before
    assert counters[COUNTER] == counters["compilations"] // 2


@pytest.mark.parametrize(
    ("dtype", "tokens", "forward", "backward"),
    [
        (torch.bfloat16, 128, torch.bfloat16, torch.float32),
        (torch.bfloat16, 200, torch.bfloat16, torch.bfloat16),
        (torch.float16, 200, torch.float32, torch.float32),
        (torch.float32, 8, torch.float32, torch.float32),
    ],
    ids=str,
)
def test_attention_is_upcast_only_where_single_precision_is_faster(dtype, tokens, forward, backward):
    operands = [torch.randn(1, 2, tokens, 8, dtype=dtype) for _ in range(3)]
    for kernel, expected in ((FLASH_FORWARD, forward), (FLASH_BACKWARD, backward)):
        assert {one.dtype for one in in_faster_type(kernel, operands)} == {expected}
