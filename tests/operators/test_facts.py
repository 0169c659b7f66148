"""The records of operators."""

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 - defines operators
from torch import fx

import ort_accel.engine  # noqa: F401 - defines operators
from ort_accel.operators.facts import _RECORDS, Facts, facts


def node_of(target):
    return fx.Graph().call_function(target, ())


@pytest.mark.parametrize("name", _RECORDS)
def test_each_record_is_found_by_a_node_of_its_operator(name):
    library, _, operator = name.partition(".")
    packet = getattr(getattr(torch.ops, library), operator)
    for overload in packet.overloads():
        assert facts(node_of(getattr(packet, overload))) is _RECORDS[name]


@pytest.mark.parametrize("target", [torch.ops.aten.cos.default, torch.cos])
def test_other_nodes_have_the_defaults(target):
    assert facts(node_of(target)) == Facts()


def test_an_attention_without_a_record_is_an_attention():
    known = facts(node_of(torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default))
    assert known.onnx_name == "Attention"
    assert known.flops is None
