"""Changes of models of transformers whose rows are skipped, between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from tests.against_eager import assert_same, pair, report, step
from tests.engine.changes import Change, data_of


def padded(rows: int = 3, length: int = 8) -> dict[str, torch.Tensor]:
    """A batch of which less than half is tokens."""
    mask = (torch.arange(length) < torch.arange(1, rows + 1)[:, None] * 2 - 1).long()
    ids = torch.arange(rows * length).view(rows, length) % 30
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


SIZES = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


TRANSFORMERS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module]]] = {
    "bert": (lambda: BertForMaskedLM(BertConfig(**SIZES)), lambda model: model.bert.encoder.layer[0]),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), lambda model: model.model.layers[0]),
}


@contextmanager
def attention_written_out(model: nn.Module) -> Iterator[None]:
    model.set_attn_implementation("eager")
    yield
    model.set_attn_implementation("sdpa")


@contextmanager
def checkpointing(model: nn.Module) -> Iterator[None]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    yield
    model.gradient_checkpointing_disable()


@contextmanager
def under_autocast() -> Iterator[None]:
    torch.set_autocast_enabled("cpu", True)
    yield
    torch.set_autocast_enabled("cpu", False)


@pytest.mark.long
@pytest.mark.parametrize("family", TRANSFORMERS)
def test_a_model_of_transformers_whose_rows_are_skipped(family):
    """What is prepared for a batch or kept of weights is not that of the model as it was before a change."""
    make, layer = TRANSFORMERS[family]
    torch.manual_seed(0)
    eager, ours = pair(make())
    name = next(iter(layer(eager).state_dict()))
    weight = layer(eager).get_parameter(name).detach() * 2

    def zeroed(module, args):
        return args[0] * 0, *args[1:]

    changes: list[Change] = [
        lambda model: layer(model).register_forward_pre_hook(zeroed),
        lambda model: layer(model).register_full_backward_hook(
            lambda module, of_input, _: (of_input[0] * 2, *of_input[1:])
        ),
        attention_written_out,
        checkpointing,
        lambda model: data_of(layer(model).get_parameter(name), weight.clone()),
        lambda model: patch.object(model.get_output_embeddings(), "weight", nn.Parameter(torch.ones(30, 16) / 9)),
    ]
    for change in changes:
        for casts in (nullcontext, under_autocast):
            tolerance = {} if casts is nullcontext else {"rtol": 0.1, "atol": 0.02}
            with ExitStack() as stack:
                for model in (eager, ours):
                    stack.enter_context(change(model))
                with casts():
                    assert_same(step(ours, **padded()), step(eager, **padded()), **tolerance)
            assert_same(step(ours, **padded()), step(eager, **padded()))
    assert report(ours).counters["batches run on some rows"] > 0
