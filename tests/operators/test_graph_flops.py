"""The operations of a compiled graph are those that PyTorch's counter sees in eager mode, at every size."""

import copy
import pickle
from itertools import product

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import LlamaConfig, LlamaForCausalLM

import ort_accel
from ort_accel.operators.flops import GraphFlops
from ort_accel.runtime.work_count import WORK
from tests.tiers import mostly_long

aten = torch.ops.aten


def attention(query, key, value, *_, out_shape=None, **__):
    return sdpa_flop_count(query, key, value)


def attention_backward(grad, query, key, value, *_, out_shape=None, **__):
    return sdpa_backward_flop_count(grad, query, key, value)


ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
}
"""The formulas for attention on the CPU, which PyTorch's counter does not know."""

ALL_ROWS = {"labels": False, "padding": False}


def llama(**more):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, intermediate_size=64, use_cache=False, **more))


def adapted(model):
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def counted(model, ids):
    WORK.begin()
    model(input_ids=ids, labels=ids).loss.backward()
    return WORK.end()


def seen(model, ids):
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("implementation", "memory"),
    mostly_long(product(["eager", "sdpa"], [{}, {"level": 1}]), ("eager", {}), ("sdpa", {"level": 1})),
    ids=["eager, saved", "eager, recomputed", "sdpa, saved", "sdpa, recomputed"],
)
def test_a_step_has_the_operations_of_eager_mode(implementation, memory):
    eager = llama(attn_implementation=implementation)
    ours = ort_accel.accelerate(copy.deepcopy(eager), {"density": ALL_ROWS, "memory": memory})
    for shape in ((2, 16), (3, 24), (2, 20)):
        ids = torch.randint(1, 64, shape)
        assert counted(ours, ids) == seen(eager, ids)


def test_frozen_weights_have_no_gradient_to_count():
    torch.manual_seed(0)
    eager = adapted(llama(attn_implementation="eager"))
    ours = ort_accel.accelerate(copy.deepcopy(eager), {"density": ALL_ROWS})
    ids = torch.randint(1, 64, (2, 16))
    assert counted(ours, ids) == seen(eager, ids) < counted(ort_accel.accelerate(llama()), ids)


def test_rows_that_are_left_out_do_not_count():
    ours = ort_accel.accelerate(llama(), {"density": {"padding": True}})
    ids = torch.randint(1, 64, (4, 16))
    mask = torch.ones_like(ids)
    mask[:, 8:] = 0
    WORK.begin()
    ours(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    assert WORK.end() < 0.6 * counted(ort_accel.accelerate(llama(), {"density": ALL_ROWS}), ids)


def test_eager_mode_beside_the_engine_leaves_the_count_unknown():
    ours = ort_accel.accelerate(llama())
    ids = torch.randint(1, 64, (2, 16))
    assert counted(ours, ids)
    WORK.begin()
    ours(input_ids=ids, labels=ids).loss.backward()
    WORK.missed()
    assert WORK.end() is None
    WORK.begin()
    assert WORK.end() is None  # nothing ran


def test_a_count_is_kept_with_its_graph():
    traced = make_fx(torch.mm, tracing_mode="symbolic")(torch.ones(2, 3), torch.ones(3, 5))
    sizes = {str(size): value for size, value in zip(GraphFlops(traced.graph)._sizes.sizes, (7, 8, 9), strict=True)}
    assert pickle.loads(pickle.dumps(GraphFlops(traced.graph)))(sizes) == 2 * 7 * 8 * 9
