"""Estimated floating point operations, against torch's own counter in the same run."""

import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import ort_accel


def counted_by_torch(model, step):
    with FlopCounterMode(display=False) as counter:
        step(model)
    return counter.get_total_flops()


WHOLE = {"density": {"labels": False, "padding": False}, "compute": {"upstream": False}}
"""Nothing is left out, so that what is counted is what torch counts."""


def counted_by_us(model, step, **compute):
    ort_accel.accelerate(model, WHOLE | {"compute": WHOLE["compute"] | compute})
    step(model)
    return computed(model)


def computed(model):
    return sum(segment.flops for segment in ort_accel.report(model).segments)


def bert(attention, layers=2):
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    config = hf.BertConfig(**sizes, num_hidden_layers=layers, num_labels=3)
    return hf.BertForSequenceClassification._from_config(config, attn_implementation=attention).train()


def classify(length):
    def step(model):
        ids = torch.randint(3, 50, (2, length))
        model(input_ids=ids, labels=torch.tensor([0, 2])).loss.backward()

    return step


def convnet():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.Conv2d(4, 6, 3, dilation=2),
        nn.Flatten(),
        nn.LazyLinear(5),
    )


def test_bert_counts_as_torch_counts_it():
    model = bert("eager")
    expected = counted_by_torch(model, classify(7))
    assert counted_by_us(model, classify(7)) == expected > 100_000


def test_a_size_that_can_change_counts_as_it_was_when_it_was_compiled():
    model = bert("eager", layers=1)
    each = [counted_by_torch(model, classify(length)) for length in (7, 9)]
    ort_accel.accelerate(model, WHOLE)
    for length in (7, 9, 11):
        classify(length)(model)
    assert computed(model) == sum(each)


def test_work_that_is_left_out_is_not_counted():
    whole = counted_by_us(bert("eager", layers=1), classify(7))
    skipping = ort_accel.accelerate(bert("eager", layers=1), {"compute": {"upstream": True}})
    classify(7)(skipping)
    assert 0 < computed(skipping) < whole


def test_fused_attention_counts_its_products_and_the_scores_of_its_backward():
    torch.manual_seed(0)
    fused = bert("sdpa").eval()
    counted = counted_by_us(fused, classify(7), attention="fused")
    products = counted_by_torch(bert("eager"), classify(7))
    scores = 2 * (2 * 2) * 7 * 7 * 8  # per layer: batch x heads matrices of 7 x 7 from heads of 8
    assert counted == products + 2 * scores
    coverage = ort_accel.report(fused).coverage
    in_pytorch = sum(
        one["flops"] - one["flops_in_onnxruntime"] + one["flops_by_pytorch_in_onnxruntime"] for one in coverage.values()
    )
    assert in_pytorch == 2 * 7 * scores


@pytest.mark.parametrize("wants_input_grad", [False, True])
def test_convolutions_count_as_torch_counts_them(wants_input_grad):
    def step(model):
        model(torch.randn(2, 3, 12, 12, requires_grad=wants_input_grad)).sum().backward()

    model = convnet()
    model(torch.randn(2, 3, 12, 12))
    assert counted_by_us(model, step) == counted_by_torch(ort_accel.restore(model), step) > 10_000


def test_groups_divide_the_work_of_both_gradients():
    def step(model):
        model(torch.randn(2, 8, 10, requires_grad=True)).sum().backward()

    whole = counted_by_us(nn.Conv1d(8, 8, 3), step)
    assert counted_by_us(nn.Conv1d(8, 8, 3, groups=4), step) == whole / 4
