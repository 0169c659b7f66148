"""A report names the line of the model that asks for an operator, and none where only a rewrite asks for it."""

import re

import pytest
import torch
import transformers as hf
from torch import fx, nn

import ort_accel
from ort_accel.compiler import compile_graph
from ort_accel.graph.nodes import op_name, user_line
from tests.against_eager import assert_step_as_eager, pair

SAYS = {"embedding": "embedding", "dropout": "dropout", "attention": "attention", "tanh": "tanh|pool|activation"}
"""What stands in the line that asks for an operator, by a part of the operator's name."""


def bert_lines(monkeypatch, lengths=(16, 24, 32)):
    """A padded BERT trained on several lengths: its report, and for each node the operator and its line."""
    found = set()
    lower = compile_graph.lower_graph

    def look(module: fx.GraphModule, *args, **kwargs):
        found.update((op_name(node), user_line(node)) for node in module.graph.nodes if node.op == "call_function")
        return lower(module, *args, **kwargs)

    monkeypatch.setattr("ort_accel.compiler.autograd_graphs.lower_graph", look)
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=90, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
    )
    model = ort_accel.accelerate(hf.BertForSequenceClassification(config).train(), {"density": {"padding": True}})
    for length in lengths:
        mask = (torch.arange(length) < torch.tensor([[length // 2], [length], [length - 3]])).long()
        ids = torch.randint(1, 90, mask.shape)
        model(input_ids=ids, attention_mask=mask, labels=torch.tensor([0, 1, 1])).loss.backward()
    return ort_accel.report(model), found


def test_nodes_of_rewrites_have_no_line_and_the_models_have_their_own(monkeypatch):
    report, found = bert_lines(monkeypatch)
    ours = {line for op, line in found if "rows_of.default" in op or "remainder" in op or "index_add" in op}
    assert ours == {""}
    assert any("remainder" in op for op, _ in found)  # sizes change, and rows are looked up by their place
    wrong = {
        (op, line)
        for op, line in found
        for part, words in SAYS.items()
        if part in op and line and not re.search(words, line)
    }
    assert wrong == set()
    assert [item for item in report.fallbacks if not item.reason.is_choice] == []


class Shared(nn.Module):
    """Uses a value twice, so that the backward adds two gradients."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.linear(x)
        once = hidden.sin()
        return (once * hidden.cos()).sum()


def test_a_sum_of_gradients_is_on_no_line(monkeypatch):
    eager, ours = pair(Shared(), {"version": 1, "engine": {"run_in_pytorch": ["aten.add", "aten.sin"]}})
    assert_step_as_eager(eager, ours, torch.randn(4, 8))
    lines = {item.op: item.where for item in ort_accel.report(ours).fallbacks}
    assert lines["aten.add.Tensor"] == ""
    assert lines["aten.sin.default"].endswith("once = hidden.sin()")


def test_a_model_of_torchs_modules_alone_has_no_lines():
    eager, ours = pair(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh()), {"version": 1, "engine": {"run_in_pytorch": ["aten.tanh"]}}
    )
    assert_step_as_eager(eager, ours, torch.randn(3, 8))
    (item,) = ort_accel.report(ours).fallbacks
    assert (item.op, item.where) == ("aten.tanh.default", "")


def nowhere(path):
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = f'  File "{path}", line 3, in forward\n    return x.sin()'
    return user_line(node)


@pytest.mark.parametrize("path", [ort_accel.__file__, f"{ort_accel.__path__[0]}/hf/fused_head.py"])
def test_code_of_this_package_is_no_line_of_a_model(path):
    assert nowhere(path) == ""


def test_a_script_in_a_folder_called_torch_is_the_users():
    assert nowhere("/home/me/torch/train.py") == "train.py:3: return x.sin()"


class Places(nn.Module):
    """Divides integers by a size that changes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        places = torch.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2])
        column, row = places % x.shape[1], places // x.shape[1]
        return (self.linear(x) * (column + 2 * row).unsqueeze(-1)).sum()


def test_integers_are_divided_by_sizes_in_onnx_runtime():
    eager, ours = pair(Places(), {"version": 1, "engine": {"fallback": "error", "dynamic_shapes": True}})
    for rows, columns in ((3, 5), (4, 7), (6, 2)):
        assert_step_as_eager(eager, ours, torch.randn(rows, columns, 4))
    ran = {op for segment in ort_accel.report(ours).segments if segment.runner == "onnxruntime" for op in segment.ops}
    assert {"aten.remainder.Scalar", "aten.floor_divide.default"} <= ran
