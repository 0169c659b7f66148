"""Models that skip padding and ignored labels learn what they learn in eager mode."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import fx

from ort_accel.operators.flops import flops
from ort_accel.row_skipping.attention_match import Attention
from ort_accel.row_skipping.pipeline import Proposal
from tests.against_eager import assert_step_as_eager, compilations, pair, report
from tests.models.zoo import DECODER, ENCODER, SEQ2SEQ, T5, VOCABULARY, made
from tests.row_skipping.rewritten import Rewritten, assert_as_eager
from tests.tiers import mostly_long

CONFIG = {"engine": {"dynamic_shapes": True}, "density": {"padding": True}, "observe": {"log_level": "error"}}

ONE_LAYER = {"num_hidden_layers": 1}

CLASSES = {"num_labels": 3, "problem_type": "single_label_classification"}
"""Named, since a model that finds the problem out changes at its first step, and is compiled twice."""

DISTANCES = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "pad_token_id": 0}

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

Batch = dict[str, Any]


def padded(rows: int, length: int, side: str) -> Batch:
    """Returns sequences of any length from none to full."""
    kept = torch.randint(0, length + 1, (rows, 1))
    kept[0] = torch.randint(length // 2, length + 1, ())
    place = torch.arange(length)
    mask = ((place < kept) if side == "right" else (place >= length - kept)).long()
    return {"input_ids": torch.randint(3, VOCABULARY, (rows, length)) * mask, "attention_mask": mask}


def some_labelled(batch: Batch, share: float = 0.4) -> torch.Tensor:
    """Returns labels for some real tokens."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    return ids.masked_fill((torch.rand(ids.shape) > share) | (mask == 0), -100)


def classified(rows: int, length: int, side: str) -> Batch:
    batch = padded(rows, length, side)
    return batch | {"labels": torch.randint(0, 3, (rows,))}


def classified_from_the_left(rows: int, length: int, side: str) -> Batch:
    """For models whose padding attends to everything, so that a padded first token needs all rows."""
    return classified(rows, length, "right")


def masked(rows: int, length: int, side: str) -> Batch:
    batch = padded(rows, length, side)
    return batch | {"labels": some_labelled(batch)}


def causal(rows: int, length: int, side: str) -> Batch:
    """Answers behind prompts without labels: no padded position says what comes next."""
    batch = padded(rows, length, side)
    behind_prompt = batch["attention_mask"].cumsum(1) > 1
    return batch | {"labels": some_labelled(batch, 0.8).masked_fill(~behind_prompt, -100), "use_cache": False}


def cached(rows: int, length: int, side: str) -> Batch:
    """A call without `use_cache=False`: the model returns keys and values."""
    return {name: value for name, value in causal(rows, length, side).items() if name != "use_cache"}


def sequence_to_sequence(rows: int, length: int, side: str) -> Batch:
    """Questions and answers that are padded differently."""
    question, answer = padded(rows, length, side), padded(rows, length - 3, "right")
    question["attention_mask"][:, -1] = 1
    return question | {"labels": some_labelled(answer, 0.9)}


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[..., Batch]]] = {
    "bert": (made("BertForSequenceClassification", "BertConfig", **ENCODER | ONE_LAYER | CLASSES), classified),
    "roberta": (made("RobertaForMaskedLM", "RobertaConfig", **ENCODER | ONE_LAYER, pad_token_id=0), masked),
    "distilbert": (
        made(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            vocab_size=VOCABULARY,
            dim=16,
            n_layers=1,
            n_heads=2,
            hidden_dim=32,
            **CLASSES,
        ),
        classified,
    ),
    "bert, its attention written out": (
        made("BertForMaskedLM", "BertConfig", **ENCODER, attn_implementation="eager"),
        masked,
    ),
    "mpnet": (made("MPNetForMaskedLM", "MPNetConfig", **ENCODER | ONE_LAYER, pad_token_id=0), masked),
    "deberta": (made("DebertaForMaskedLM", "DebertaConfig", **ENCODER | ONE_LAYER | DISTANCES), masked),
    "deberta-v2": (
        made(
            "DebertaV2ForSequenceClassification", "DebertaV2Config", **ENCODER | DISTANCES | CLASSES, position_buckets=8
        ),
        classified_from_the_left,
    ),
    "deberta-v3": (
        made(
            "DebertaV2ForMaskedLM",
            "DebertaV2Config",
            **ENCODER | ONE_LAYER | DISTANCES,
            position_buckets=4,
            share_att_key=True,
            norm_rel_ebd="layer_norm",
            position_biased_input=False,
        ),
        masked,
    ),
    "electra": (made("ElectraForMaskedLM", "ElectraConfig", **ENCODER | ONE_LAYER, embedding_size=8), masked),
    "gpt2": (
        made("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64),
        causal,
    ),
    "llama": (made("LlamaForCausalLM", "LlamaConfig", **DECODER | ONE_LAYER), causal),
    "llama, with its cache": (made("LlamaForCausalLM", "LlamaConfig", **DECODER), cached),
    "llama, by the last token": (
        made("LlamaForSequenceClassification", "LlamaConfig", **DECODER | ONE_LAYER | CLASSES),
        classified,
    ),
    "gemma": (made("GemmaForCausalLM", "GemmaConfig", **DECODER | ONE_LAYER), cached),
    "gemma2": (made("Gemma2ForCausalLM", "Gemma2Config", **DECODER | ONE_LAYER), cached),
    "phi3": (
        made("Phi3ForCausalLM", "Phi3Config", **{name: DECODER[name] for name in DECODER if name != "head_dim"}),
        cached,
    ),
    "falcon": (
        made(
            "FalconForCausalLM",
            "FalconConfig",
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            attention_dropout=0.1,
            hidden_dropout=0.1,
        ),
        causal,
    ),
    "mistral": (made("MistralForCausalLM", "MistralConfig", **DECODER | ONE_LAYER, sliding_window=6), causal),
    "qwen2": (made("Qwen2ForCausalLM", "Qwen2Config", **DECODER | ONE_LAYER), causal),
    "mixtral": (made("MixtralForCausalLM", "MixtralConfig", **DECODER, **EXPERTS), causal),
    "qwen3, with experts": (
        made(
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            **DECODER,
            moe_intermediate_size=8,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
        ),
        causal,
    ),
    "gpt-oss": (made("GptOssForCausalLM", "GptOssConfig", **DECODER, **EXPERTS), causal),
    "t5": (
        made("T5ForConditionalGeneration", "T5Config", **T5 | {"num_layers": 1}),
        sequence_to_sequence,
    ),
    "bart": (
        made("BartForConditionalGeneration", "BartConfig", **SEQ2SEQ | {"encoder_layers": 1, "decoder_layers": 1}),
        sequence_to_sequence,
    ),
}


ON_THE_ENGINE = ("bert", "bart", "falcon")
"""The others' smaller graphs are run by PyTorch, which takes less time; `test_parity` lowers those of all families."""

ONE_OF_EACH_MECHANISM = (
    "bert, its attention written out",
    "gpt2",
    "llama, by the last token",
    "qwen3, with experts",
    "t5",
)
"""Models of which `make test` runs the smaller graphs."""

SIZES_ARE_LEARNED = {"falcon"}
"""Models whose `logits_to_keep` would become symbolic with dynamic shapes from the first batch on."""

SIZES = [(5, 12), (3, 9), (6, 15), (4, 11)]


MANY = 20
"""The number of batches where each takes little time."""


def batches(name: str, many: int = len(SIZES)) -> Iterator[Batch]:
    """Yields batches of the sizes above and of random ones, padded on the right and on the left in turn.

    In the first batch no sequence is all padding."""
    chance = random.Random(name)
    more = [(chance.randint(2, 6), chance.randint(6, 15)) for _ in range(many - len(SIZES))]
    for number, (rows, length) in enumerate([*SIZES, *more]):
        torch.manual_seed(number)
        batch = MODELS[name][1](rows, length, "left" if number % 2 else "right")
        if number == 0:
            batch["attention_mask"][:, 0] = 1
        yield batch


@pytest.mark.parametrize("name", mostly_long(ON_THE_ENGINE, "bert"))
def test_a_step_on_the_engine_equals_eagers(name: str) -> None:
    sizes = "auto" if name in SIZES_ARE_LEARNED else True
    eager, ours = pair(MODELS[name][0](), CONFIG | {"engine": {"dynamic_shapes": sizes}})
    for seed, batch in enumerate(batches(name)):
        assert_step_as_eager(eager, ours, **batch, seed=seed)
    assert report(ours).counters["batches run on some rows"] >= (1 if name == "bart" else len(SIZES) - 1)
    once = 2  # a forward and a backward
    assert compilations(ours) == (2 * once if name in SIZES_ARE_LEARNED else once)


@pytest.mark.parametrize("name", mostly_long(("bert", "llama", "bart"), "llama"))
def test_checkpointed_layers_recompute_only_the_needed_rows(name: str) -> None:
    eager, ours = pair(MODELS[name][0](), CONFIG)
    for model in (eager, ours):
        model.gradient_checkpointing_enable()
    for seed, batch in enumerate(batches(name)):
        assert_step_as_eager(eager, ours, **batch, seed=seed)
    assert report(ours).counters["batches run on some rows"] >= (1 if name == "bart" else len(SIZES) - 1)
    assert compilations(ours) == 2, "a forward and a backward"
    (memory,) = report(ours).memory.values()
    assert memory.repeated
    assert memory.stash < 0.75 * memory.stash_without


@pytest.mark.parametrize(
    "name", mostly_long((name for name in MODELS if name not in ON_THE_ENGINE), *ONE_OF_EACH_MECHANISM)
)
def test_a_step_of_the_smaller_graph_equals_eagers(name: str) -> None:
    eager = MODELS[name][0]()
    ours = Rewritten(copy.deepcopy(eager), loss_only=True)
    given = batches(name, MANY)
    for batch in islice(given, len(SIZES)):
        assert_as_eager(eager, ours, **batch)
    assert ours.ran["some rows"] >= len(SIZES) - 1, "where a row is padded as a whole, its first token reads padding"
    for batch in given:
        assert_as_eager(eager, ours, **batch)
    assert ours.ran["some rows"] >= 0.75 * MANY
    assert len(ours.graphs) == 1
    assert in_rows(ours.proposal) > 0.98, "all but a head that has a row for each sequence anyway"


def in_rows(proposal: Proposal) -> float:
    """Returns the share of the work that is done for some rows, without attention on all pairs."""
    whole = [each for each in proposal.plan.demands.attentions.values() if not each.can_run_varlen]
    squares = sum(flops(node) for each in whole for node in inside(each))
    return (sum(proposal.work_of.values()) + sum(proposal.work_of_runs)) / (proposal.work - squares)


def inside(attention: Attention) -> set[fx.Node]:
    """Returns the nodes from an attention's operands to its result."""
    ends = {item.node for item in attention.operands}
    pending, found = [attention.node], set[fx.Node]()
    while pending:
        if (node := pending.pop()) not in found and node not in ends:
            found.add(node)
            pending.extend(node.all_input_nodes if attention.operands else [])
    return found
