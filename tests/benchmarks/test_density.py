"""The density benchmark measures batches of the density that it names."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ort_accel.cli.benchmark.contenders import EVERYTHING
from ort_accel.cli.benchmark.workload import Workload, batch_of
from ort_accel.cli.main import app

ROOT = Path(__file__).parents[2]


def script():
    spec = importlib.util.spec_from_file_location("density_benchmark", ROOT / "benchmarks" / "density.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def shares(workload):
    batch = batch_of(workload)
    return batch["attention_mask"].double().mean().item(), (batch["labels"] != -100).double().mean().item()


@pytest.mark.parametrize("density", [0.05, 0.2, 0.35, 0.6, 0.95, 1.0])
def test_a_batch_has_the_density_that_was_asked_for_and_rows_of_many_lengths(density):
    batch = batch_of(Workload("bert", density=density))
    mask = batch["attention_mask"]
    assert mask.double().mean().item() == pytest.approx(density, abs=1e-3)
    alone = batch_of(Workload("bert", density=density, batch=1))["attention_mask"]
    assert alone.double().mean().item() == pytest.approx(density, abs=0.5 / alone.numel())
    assert len(set(mask.sum(dim=1).tolist())) > (6 if density < 0.9 else 0)
    assert torch.equal(batch["input_ids"] == 0, mask == 0)


@pytest.mark.parametrize(
    ("workload", "wanted"),
    [
        (Workload("bert-mlm", labelled=0.14), (1.0, 0.14)),
        (Workload("bert-mlm", density=0.5), (0.5, 0.075)),
        (Workload("llama", density=0.6, labelled=0.3), (0.6, 0.3)),
        (Workload("llama", density=0.6), (0.6, 0.6)),
        (Workload("gpt2"), (1.0, 1.0)),
        (Workload("qwen3-moe"), (1.0, 1.0)),
    ],
    ids=str,
)
def test_labels_are_as_many_as_were_asked_for_and_never_on_padding(workload, wanted):
    assert shares(workload) == pytest.approx(wanted, abs=5e-3)
    batch = batch_of(workload)
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()


def test_further_batches_have_other_numbers_of_tokens_around_those_shares():
    workload = Workload("llama", density=0.6, labelled=0.3)
    batches = [batch_of(workload, number) for number in range(13)]
    counts = [int(batch["attention_mask"].sum()) for batch in batches]
    labels = [int((batch["labels"] != -100).sum()) for batch in batches]
    for found, share in ((counts, 0.6), (labels, 0.3)):
        assert len(set(found)) == 13
        assert found[0] == pytest.approx(share * 1024, abs=5)
        assert sum(found) / 13 == pytest.approx(share * 1024, abs=5)
        assert max(found) <= 1.11 * share * 1024


def test_further_batches_without_padding_have_other_words_of_the_same_length():
    one, other = (batch_of(Workload("bert"), number) for number in range(2))
    assert one["input_ids"].shape == other["input_ids"].shape
    assert not torch.equal(one["input_ids"], other["input_ids"])
    assert other["attention_mask"].all()


def test_the_cases_have_the_densities_of_the_documentation():
    cases = {str(name): case for name, case in script().CASES.items()}
    assert shares(cases["classification"].workload)[0] == pytest.approx(0.35, abs=1e-3)
    assert shares(cases["mlm"].workload) == pytest.approx((1.0, 0.14), abs=1e-3)
    assert shares(cases["causal"].workload) == pytest.approx((0.6, 0.3), abs=5e-3)
    assert shares(cases["full"].workload)[0] == 1


@pytest.mark.long
def test_the_script_compares_the_engine_with_itself_at_full_density_and_writes_json(tmp_path):
    file = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/density.py", "--tiny", "--no-fresh", "--no-inductor", "--threads", "1"]
    command += ["--steps", "2", "--warmup", "1", "--case", "full", "--case", "mlm", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert set(found["full"]["seconds"]) == {"ort_accel", EVERYTHING}
    assert set(found["mlm"]["seconds"]) == {"eager", "ort_accel"}
    assert set(found["full"]["ratios"]) == {EVERYTHING}
    assert set(found["mlm"]["ratios"]) == {"eager"}
    assert "14% labelled" in done.stdout


def test_more_labels_than_tokens_cannot_be_measured():
    assert CliRunner().invoke(app, ["bench", "--density", "0.3", "--labelled", "0.4"]).exit_code == 2
