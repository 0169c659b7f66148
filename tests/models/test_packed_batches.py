"""Several sequences in a row: each attends to itself alone, as fast as alone, and nothing is compiled for new lengths.

The unpacked run is eager PyTorch's, one sequence at a time.
"""

import copy

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import ort_accel
from ort_accel.data import PackingCollator
from ort_accel.kernels import attention_native
from ort_accel.native.library import native_library
from ort_accel.reporting.report import State
from tests.against_eager import ATOL, RTOL, compilations
from tests.tiers import mostly_long

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "use_cache": False}
PACKED = "packed sequences"


def llama(**more):
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=64, **more))


def mistral(**more):
    return MistralForCausalLM(
        MistralConfig(**SIZES, num_key_value_heads=2, intermediate_size=64, sliding_window=4, **more)
    )


def gpt2(**more):
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **more))


def examples(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(1, 64, (length,), generator=generator).tolist()} for length in lengths]


def tokens_with_loss(data):
    return sum(len(one["input_ids"]) - 1 for one in data)


def unpacked(model, data):
    """Sums losses and gradients of single sequences in eager mode."""
    model.zero_grad()
    losses = []
    for one in data:
        ids = torch.tensor([one["input_ids"]])
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=tokens_with_loss(data)).loss
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_as_unpacked(eager, ours, data, collator):
    losses, gradients = unpacked(eager, data)
    ours.zero_grad()
    loss = ours(**collator(data), num_items_in_batch=tokens_with_loss(data)).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), losses.sum(), rtol=RTOL, atol=ATOL)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[name], rtol=RTOL, atol=ATOL, msg=lambda text, n=name: f"{n}: {text}"
        )


BATCHES = [(9, 4, 12, 1), (3, 14, 6), (5, 5, 5, 8, 2), (17, 2, 6), (11, 7, 7)]


ONE_ROW, ROWS = PackingCollator(return_flash_attn_kwargs=True), PackingCollator(max_length=20)


@pytest.mark.parametrize(
    ("build", "collator"),
    mostly_long([(llama, ONE_ROW), (llama, ROWS), (mistral, ROWS), (gpt2, ONE_ROW)], (mistral, ROWS)),
    ids=["one row", "rows", "sliding window", "learned positions"],
)
def test_sequences_of_a_row_train_as_alone(build, collator):
    torch.manual_seed(0)
    eager = build(attn_implementation="sdpa")
    ours = ort_accel.accelerate(copy.deepcopy(eager), {"engine": {"fallback": "error"}})
    compiled = []
    for seed, lengths in enumerate(BATCHES):
        assert_as_unpacked(eager, ours, examples(*lengths, seed=seed), collator)
        compiled.append(compilations(ours))
    report = ort_accel.report(ours)
    assert report.counters[PACKED] == sum(length > 1 for lengths in BATCHES for length in lengths)
    assert report.counters["batches run on some rows"] == len(BATCHES)
    assert "of the pairs of tokens in packed rows" in report.features["density.padding"].effect
    assert compiled[1:] == compiled[1:2] * (len(BATCHES) - 1)


@pytest.mark.parametrize("of", mostly_long(range(4), 2))
def test_the_loss_of_each_sequence_is_its_own(of):
    torch.manual_seed(0)
    eager = llama(attn_implementation="sdpa")
    ours = ort_accel.accelerate(copy.deepcopy(eager))
    data = examples(*BATCHES[0])
    data = [
        {**one, "labels": one["input_ids"] if at == of else [-100] * len(one["input_ids"])}
        for at, one in enumerate(data)
    ]
    losses, _ = unpacked(eager, data)
    batch = PackingCollator()(data)
    loss = ours(**batch, num_items_in_batch=tokens_with_loss(data)).loss
    torch.testing.assert_close(loss, losses[of], rtol=RTOL, atol=ATOL)


def test_unfused_attention_keeps_sequences_apart():
    torch.manual_seed(0)
    eager = llama(attn_implementation="eager")
    ours = ort_accel.accelerate(copy.deepcopy(eager), {"engine": {"fallback": "error"}})
    for seed, lengths in enumerate(BATCHES[:3]):
        assert_as_unpacked(eager, ours, examples(*lengths, seed=seed), PackingCollator())


@pytest.mark.skipif(native_library() is None, reason="the native library is not built")
def test_the_packed_kernel_runs_each_sequence(monkeypatch):
    calls = []
    kernel = attention_native.forward
    monkeypatch.setattr(
        attention_native,
        "forward",
        lambda q, k, v, pairs, *more: (
            calls.append([(one.queries.length, one.keys.length) for one in pairs.parsed.sequences if one.pairs]),
            kernel(q, k, v, pairs, *more),
        )[1],
    )
    ours = ort_accel.accelerate(llama(attn_implementation="sdpa"), {"compute": {"native": False}})
    ours(**PackingCollator()(examples(9, 4, 12))).loss.backward()
    assert calls == [[(8, 8), (3, 3), (11, 11)]] * 2  # the last token of a sequence predicts nothing


def test_a_mask_of_blocks_that_a_script_makes_is_split():
    torch.manual_seed(0)
    config = BertConfig(
        **{**SIZES, "use_cache": True}, intermediate_size=64, hidden_dropout_prob=0, attention_probs_dropout_prob=0
    )
    eager = BertForMaskedLM._from_config(config, attn_implementation="sdpa")
    ours = ort_accel.accelerate(copy.deepcopy(eager), {"density": {"padding": True}})
    ids = torch.tensor([[*range(3, 12), *range(20, 26)]])
    numbers = torch.tensor([[0] * 9 + [1] * 6])
    mask = (numbers[:, :, None] == numbers[:, None, :])[:, None]
    positions = torch.tensor([[*range(9), *range(6)]])
    apart = [eager(input_ids=part, labels=part).loss * part.numel() / 15 for part in ids.split([9, 6], 1)]
    sum(apart).backward()
    loss = ours(input_ids=ids, attention_mask=mask, position_ids=positions, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, sum(apart), rtol=RTOL, atol=ATOL)
    for (name, parameter), wanted in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad, rtol=RTOL, atol=ATOL, msg=name)
    assert ort_accel.report(ours).counters[PACKED] == 2


def test_prefixes_that_all_tokens_of_a_sequence_see_stay_within_it():
    torch.manual_seed(0)
    eager = llama(attn_implementation="sdpa")
    ours = ort_accel.accelerate(copy.deepcopy(eager), {"density": {"padding": True}})
    data = examples(9, 6)
    masks = [torch.ones(n, n).tril().index_fill(1, torch.arange(3), 1) for n in (9, 6)]
    losses = []
    for one, mask in zip(data, masks, strict=True):
        ids, allowed = torch.tensor([one["input_ids"]]), mask.bool()[None, None]
        losses.append(eager(input_ids=ids, attention_mask=allowed, labels=ids, num_items_in_batch=13).loss)
    sum(losses).backward()
    whole = torch.block_diag(*masks).bool()[None, None]
    loss = ours(**PackingCollator()(data), attention_mask=whole, num_items_in_batch=13).loss
    loss.backward()
    torch.testing.assert_close(loss, sum(losses), rtol=RTOL, atol=ATOL)
    for (name, parameter), wanted in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad, rtol=RTOL, atol=ATOL, msg=name)
    assert ort_accel.report(ours).counters[PACKED] == 2


def test_dropout_is_eager_mode_s():
    torch.manual_seed(0)
    eager = llama(attn_implementation="sdpa", attention_dropout=0.3)
    ours = ort_accel.accelerate(copy.deepcopy(eager))
    batch = PackingCollator()(examples(*BATCHES[0]))
    losses = []
    for model in (eager, ours):
        torch.manual_seed(5)
        losses.append(model(**batch).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=RTOL, atol=ATOL)
    for wanted, got in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=RTOL, atol=ATOL)


def test_without_density_padding_rows_stay_whole():
    torch.manual_seed(0)
    eager = llama(attn_implementation="sdpa")
    ours = ort_accel.accelerate(copy.deepcopy(eager), {"density": {"padding": False}})
    assert_as_unpacked(eager, ours, examples(*BATCHES[0]), PackingCollator())
    assert ort_accel.report(ours).counters[PACKED] == 0
    assert ort_accel.report(ours).features["density.padding"].state is State.OFF
