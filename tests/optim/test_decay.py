"""Weight decay is for matrices: every kind of norm and every bias is left out."""

import inspect
import types

import pytest
import torch
from torch import nn
from transformers.models.bert import modeling_bert
from transformers.models.bloom import modeling_bloom
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.t5 import modeling_t5
from transformers.models.vit import modeling_vit

from ort_accel.optim import decay_groups
from ort_accel.optim.decay import decayed

TORCH_NORMS = [
    nn.LayerNorm((3, 4)),
    nn.RMSNorm((3, 4)),
    nn.GroupNorm(2, 4),
    nn.BatchNorm1d(4),
    nn.BatchNorm2d(4),
    nn.BatchNorm3d(4),
    nn.SyncBatchNorm(4),
    nn.InstanceNorm1d(4, affine=True),
    nn.InstanceNorm2d(4, affine=True),
    nn.InstanceNorm3d(4, affine=True),
]

MODELING = [
    modeling_bert,
    modeling_bloom,
    modeling_gemma2,
    modeling_gpt2,
    modeling_llama,
    modeling_mamba2,
    modeling_qwen3,
    modeling_t5,
    modeling_vit,
]


def norms_of(module: types.ModuleType):
    for name, kind in inspect.getmembers(module, inspect.isclass):
        if "norm" in name.lower() and issubclass(kind, nn.Module):
            yield pytest.param(kind, id=f"{module.__name__.rpartition('.')[2]}.{name}")


@pytest.mark.parametrize("norm", TORCH_NORMS, ids=lambda norm: type(norm).__name__)
def test_the_norms_of_pytorch_do_not_decay(norm):
    assert list(norm.parameters())
    assert decayed(norm) == []


@pytest.mark.parametrize("kind", [each for module in MODELING for each in norms_of(module)])
def test_the_norms_of_transformers_do_not_decay(kind):
    required = [each for each in inspect.signature(kind).parameters.values() if each.default is each.empty]
    norm = kind(*[8] * len(required))
    assert list(norm.parameters())
    assert decayed(nn.Sequential(norm)) == []


def test_biases_do_not_decay_whatever_they_belong_to():
    model = nn.ModuleDict(
        {"attention": nn.MultiheadAttention(4, 2), "rnn": nn.LSTM(3, 4), "line": nn.Bilinear(2, 3, 4)}
    )
    names = decayed(model)
    assert {name.rpartition(".")[2] for name in names} == {"in_proj_weight", "weight", "weight_ih_l0", "weight_hh_l0"}


def test_a_matrix_in_a_class_called_norm_decays():
    class LayerNormLinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 4))
            self.layer_norm_weight = nn.Parameter(torch.ones(4))
            self.bias = nn.Parameter(torch.ones(3))

    assert decayed(LayerNormLinear()) == ["weight"]


def test_tied_and_frozen_parameters_are_each_in_one_group_or_none():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5), nn.RMSNorm(5))
    model[1].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    first, second = decay_groups(model, 0.1)
    assert [id(p) for p in first["params"]] == [id(model[0].weight)]
    assert [id(p) for p in second["params"]] == [id(model[1].bias)]
    assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.0)
