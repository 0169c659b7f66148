"""Activation statistics: right figures, the same from eager and the engine, and a planted bug is named."""

import json
import math

import pytest
import torch
import transformers as hf
from torch import nn
from typer.testing import CliRunner

import ort_accel
from ort_accel import OrtAccelError
from ort_accel.cli.main import app
from ort_accel.subscribers import StatisticsSubscriber, SubscriberManager
from ort_accel.subscribers.comparison import compare, first_divergence
from ort_accel.subscribers.statistics import statistics_of
from tests.tiers import mostly_long

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "attn_implementation": "eager",
}


def bert():
    return hf.BertForSequenceClassification(hf.BertConfig(**SIZES)), torch.tensor([0, 1])


def llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=1, use_cache=False)), None


def recorded(make, folder, accelerated, plant=None):
    """Statistics of two training steps."""
    torch.manual_seed(0)
    model, labels = make()
    if plant:
        plant(model)
    if accelerated:
        ort_accel.accelerate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SubscriberManager().subscribe(model, [StatisticsSubscriber(folder)]):
        for _ in range(2):
            ids = torch.randint(0, 50, (2, 7))
            model(input_ids=ids, labels=ids if labels is None else labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return folder


@pytest.mark.parametrize("make", mostly_long([bert, llama], bert))
def test_eager_and_the_engine_agree_and_a_planted_bug_is_named(make, tmp_path):
    eager = recorded(make, tmp_path / "eager", accelerated=False)
    engine = recorded(make, tmp_path / "engine", accelerated=True)
    differences = compare(eager, engine)
    assert first_divergence(differences, 1e-3) is None
    assert {item.direction for item in differences} == {"forward", "backward"}
    assert {item.step for item in differences} == {0, 1}

    planted = []

    def plant(model):
        name, module = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".1." in n][-1]
        planted.append(name)
        module.register_forward_hook(lambda module, args, output: output.flip(-1))

    broken = recorded(make, tmp_path / "broken", accelerated=True, plant=plant)
    parted = first_divergence(compare(eager, broken), 1e-3)
    assert (parted.step, parted.direction, parted.module) == (0, "forward", planted[0])
    result = CliRunner().invoke(app, ["compare-stats", str(eager), str(broken)])
    assert result.exit_code == 1
    assert f"first divergence: step 0, forward, {planted[0]} (Linear)" in result.stdout
    result = CliRunner().invoke(app, ["compare-stats", str(eager), str(engine)])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("bucket", [1, 7, 1 << 20])
def test_the_figures_are_right_in_any_bucket(bucket):
    values = torch.randn(5, 9, dtype=torch.float64)
    found = statistics_of(values, bucket)
    assert found["min"] == values.min()
    assert found["max"] == values.max()
    wanted = {
        "mean": values.mean(),
        "std": values.std(correction=0),
        "norm1": values.norm(1),
        "norm2": values.norm(),
        "pattern": (values.flatten() * torch.arange(45.0, dtype=torch.float64).cos()).sum(),
    }
    assert {name: found[name] for name in wanted} == pytest.approx({k: float(v) for k, v in wanted.items()})


def test_nonfinite_values_are_counted_and_left_out():
    found = statistics_of(torch.tensor([1.0, math.nan, math.inf, -math.inf, 3.0]))
    assert (found["nan"], found["inf"], found["mean"], found["max"]) == (1, 2, 2.0, 3.0)
    assert statistics_of(torch.tensor([math.nan]))["min"] is None
    assert statistics_of(torch.tensor([True, False]))["mean"] == 0.5


def test_only_the_steps_asked_for_are_written(tmp_path):
    model = nn.Linear(2, 2)
    with SubscriberManager().subscribe(model, [StatisticsSubscriber(tmp_path, start_step=1, end_step=3)]):
        for _ in range(5):
            model(torch.ones(1, 2)).sum().backward()
    files = sorted((tmp_path / "rank-0").iterdir())
    assert [file.name for file in files] == ["step-000001.jsonl", "step-000002.jsonl"]
    assert [json.loads(line)["direction"] for line in files[0].read_text().splitlines()] == ["forward", "backward"]


def test_a_folder_that_is_not_empty_is_only_written_to_on_request(tmp_path):
    recorded(bert, tmp_path, accelerated=False)
    with pytest.raises(OrtAccelError, match=r"is not empty; .*override_output_dir"):
        StatisticsSubscriber(tmp_path)
    StatisticsSubscriber(tmp_path, override_output_dir=True)
    assert not list((tmp_path / "rank-0").iterdir())


def test_a_folder_that_cannot_be_written_to_is_an_error_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OrtAccelError, match="cannot be written"):
        StatisticsSubscriber(tmp_path / "file")


NO_FIGURES = b'{"step": 0, "direction": "forward", "module": "", "tensor": 0, "call": 0}'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "holds no activation statistics"),
        (b"{}", "jsonl:1 is no line"),
        (b"\x80\xff\x00", "jsonl:1 is no line"),
        (NO_FIGURES, "jsonl:1 is no line"),
        (b"", "are empty"),
    ],
)
def test_a_folder_without_statistics_is_exit_code_2(tmp_path, content, said):
    if content is not None:
        (tmp_path / "step-000000.jsonl").write_bytes(content)
    result = CliRunner().invoke(app, ["compare-stats", str(tmp_path), str(tmp_path)])
    assert result.exit_code == 2
    assert said in result.stderr
