"""`explain` runs one step of a model and says who ran what; what it cannot run is one line and exit code 2."""

import json
import re

import pytest
import transformers as hf
from typer.testing import CliRunner

from ort_accel.cli.main import app
from tests.tiers import mostly_long

runner = CliRunner()


def explained(*arguments):
    result = runner.invoke(app, ["explain", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def folder(tmp_path):
    config = hf.BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(tmp_path)
    return tmp_path


def nodes(report, graph):
    return sum(segment["nodes"] for segment in report["segments"] if segment["graph"] == graph)


def test_a_known_name_builds_a_tiny_model():
    result = runner.invoke(app, ["explain", "bert"])
    assert result.exit_code == 0
    assert "% of the work on ONNX Runtime" in result.stdout
    assert re.search(r"^forward \d, in the order of running:", result.stdout, re.MULTILINE)
    assert re.search(r"^backward \d, in the order of running:", result.stdout, re.MULTILINE)
    assert "aten.addmm.default" in result.stdout


def test_a_folder_and_its_file_are_the_same(folder):
    assert explained(str(folder))["segments"] == explained(str(folder / "config.json"))["segments"]


def test_fewer_layers_have_fewer_nodes(folder):
    whole, part = explained(str(folder)), explained(str(folder), "--layers", "1")
    assert nodes(whole, "forward 0") > nodes(part, "forward 0") > 0


@pytest.mark.long
def test_the_size_of_the_batch_counts(folder):
    small, large = explained(str(folder)), explained(str(folder), "--batch", "4")
    flops = [sum(segment["flops"] for segment in report["segments"]) for report in (small, large)]
    assert flops[1] == 2 * flops[0]


@pytest.mark.long
def test_the_configuration_is_obeyed(folder, tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("engine:\n  run_in_pytorch: [aten.gelu]\n")
    report = explained(str(folder), "--config", str(file))
    wished = {
        fallback["op"] for fallback in report["fallbacks"] if fallback["reason"] == "asked for in the configuration"
    }
    assert wished == {"aten.gelu.default"}


@pytest.mark.parametrize(
    ("architecture", "config"),
    mostly_long(
        [
            ("BertForTokenClassification", hf.BertConfig),
            ("BertForQuestionAnswering", hf.BertConfig),
            ("BertModel", hf.BertConfig),
            ("LlamaForCausalLM", hf.LlamaConfig),
            ("ViTForImageClassification", hf.ViTConfig),
        ],
        ("ViTForImageClassification", hf.ViTConfig),
    ),
)
def test_inputs_are_made_up_for_each_kind_of_head(architecture, config, tmp_path):
    made = config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    made.vocab_size, made.image_size, made.architectures = 60, 32, [architecture]
    made.save_pretrained(tmp_path)
    assert nodes(explained(str(tmp_path)), "backward 0") > 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no config.json of transformers is there"),
        ("not json", "transformers cannot read it"),
        ('{"model_type": "no-such-model"}', "transformers cannot read it"),
        ('{"model_type": "bert"}', "names no architecture"),
        ('{"model_type": "bert", "architectures": ["NoSuchModel"]}', "names no architecture"),
        ('{"model_type": "bert", "architectures": ["BertConfig"]}', "names no architecture"),
        ("null", "transformers cannot read it"),
        (
            '{"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 33, "num_attention_heads": 4}',
            "BertModel cannot be made of it: ValueError",
        ),
    ],
)
def test_what_is_no_model_is_one_line_and_exit_code_2(content, said, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    result = runner.invoke(app, ["explain", str(tmp_path)])
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_configuration_that_cannot_be_obeyed_is_exit_code_2(tmp_path):
    (tmp_path / "x.yaml").write_text("memory:\n  offload: true\n")
    result = runner.invoke(app, ["explain", "bert", "--config", str(tmp_path / "x.yaml")])
    assert result.exit_code == 2
    assert "memory.offload" in result.stderr


def test_a_forbidden_fallback_is_exit_code_2_and_lists_the_operators(tmp_path):
    config = hf.FNetConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1, intermediate_size=32)
    config.architectures = ["FNetForMaskedLM"]  # its Fourier transforms have complex numbers
    config.save_pretrained(tmp_path)
    (tmp_path / "x.yaml").write_text("engine:\n  fallback: error\n")
    result = runner.invoke(app, ["explain", str(tmp_path), "--config", str(tmp_path / "x.yaml")])
    assert result.exit_code == 2
    assert "engine.fallback is error" in result.stderr
    assert "aten._fft_c2c.default x1" in result.stderr


def test_the_peak_of_a_step_is_predicted_and_measured_on_demand():
    report = explained("bert", "--memory")
    (frontier,) = [item["frontier"] for item in report["memory"]][-1:]
    assert frontier[-1]["bytes"] > frontier[-1]["resident"] > 0
    assert report["measured_peak"]["bytes"] > 0
    assert explained("bert")["measured_peak"] is None


@pytest.mark.parametrize("name", ["x.gif", "folder.png"])
def test_a_picture_that_cannot_be_written_is_refused_before_anything_runs(tmp_path, monkeypatch, name):
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setattr("ort_accel.cli.explain._explained", lambda *_: pytest.fail("the model was trained"))
    result = runner.invoke(app, ["explain", "bert", "--png", str(tmp_path / name)])
    assert result.exit_code == 2
    assert "--png: " in result.stderr
