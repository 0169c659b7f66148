"""`distributed.load_balancing` in real training with two processes, and where it cannot be had."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments

import ort_accel
from ort_accel import OrtAccelError
from ort_accel.hf import ORTAccelCallback, ORTTrainer
from ort_accel.reporting.report import State

SCRIPT = Path(__file__).with_name("load_balanced_run.py")
BALANCED = {"distributed": {"load_balancing": {"enabled": True}}}


def script():
    spec = importlib.util.spec_from_file_location("load_balanced_run", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUN = script()


def seen_by_two(folder, stop, resume="fresh"):
    """The samples in each step of each process."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(SCRIPT), str(folder), str(stop), resume]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{stop}-{resume}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.long
def test_two_processes_share_each_epoch_evenly_and_resume_in_the_second(tmp_path):
    whole = seen_by_two(tmp_path, 99)
    assert [len(steps) for steps in whole] == [12, 12]
    for epoch in (slice(0, 6), slice(6, 12)):
        samples = [index for steps in whole for step in steps[epoch] for index in step]
        assert set(samples) == set(range(len(RUN.LENGTHS)))
        assert len(samples) == 48  # 44 in whole steps of 2 x 4
    loads = torch.tensor([[sum(RUN.LENGTHS[index] for index in step) for step in steps] for steps in whole])
    gaps = (loads[0] - loads[1]).abs() / loads.double().mean()
    assert gaps.mean() < 0.06
    reported = json.loads((tmp_path / "report-99-fresh.json").read_text())["load_balance"]
    assert reported["after"][:5] == loads[:, :5].T.tolist()  # the sixth is filled up with samples of the first
    assert reported["waiting_before"] > 5 * reported["waiting_after"]
    assert len(reported["before"]) == 6
    assert whole[0][:6] != whole[0][6:]
    first = seen_by_two(tmp_path, 8)
    rest = seen_by_two(tmp_path, 8, "resume")
    assert [a + b for a, b in zip(first, rest, strict=True)] == whole


def arguments(tmp_path, **more):
    return TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=1, save_strategy="no", disable_tqdm=True, report_to=[], **more
    )


def collate(samples):
    return {"input_ids": torch.tensor([sample["input_ids"][0] for sample in samples])}


def test_one_process_keeps_its_own_order_and_the_report_says_why(tmp_path):
    model = RUN.Model()
    ORTTrainer(
        model, arguments(tmp_path), train_dataset=RUN.Samples(), data_collator=collate, ort_config=BALANCED
    ).train()
    feature = ort_accel.report(model).features["distributed.load_balancing.enabled"]
    assert feature.state is State.REFUSED
    assert "one process" in feature.reason


@pytest.fixture
def two_processes(monkeypatch):
    """Training arguments that believe to be the first of two processes."""
    monkeypatch.setattr(TrainingArguments, "world_size", 2)


def off(**more):
    return {"engine": {"enabled": False}, **BALANCED, **more}


def test_a_plain_trainer_cannot_balance_and_says_so(two_processes, tmp_path):
    trainer = Trainer(
        RUN.Model(),
        arguments(tmp_path),
        train_dataset=RUN.Samples(),
        data_collator=collate,
        callbacks=[ORTAccelCallback(off())],
    )
    with pytest.raises(OrtAccelError, match="use ORTTrainer"):
        trainer.train()


def test_lengths_come_from_their_column_where_there_is_one(two_processes, tmp_path):
    from datasets import Dataset

    data = Dataset.from_dict({"length": [5, 1, 9, 3], "text": list("abcd")})
    trainer = ORTTrainer(RUN.Model(), arguments(tmp_path), train_dataset=data, ort_config=off())
    assert trainer._get_train_sampler().sampler.costs.tolist() == [5, 1, 9, 3]


@pytest.mark.parametrize(
    ("data", "more", "said"),
    [
        ([{"pixels": [1]}], {}, "a sample has none"),
        (iter(()), {}, "needs a dataset with a length"),
        ([{"input_ids": [1]}], {"train_sampling_strategy": "group_by_length"}, "both decide the order"),
    ],
)
def test_a_dataset_that_cannot_be_balanced_is_an_error(two_processes, tmp_path, data, more, said):
    trainer = ORTTrainer(RUN.Model(), arguments(tmp_path, **more), ort_config=off())
    with pytest.raises(OrtAccelError, match=said):
        trainer._get_train_sampler(data)


def test_in_a_plain_training_loop_the_report_says_what_to_do():
    model = ort_accel.accelerate(torch.nn.Linear(2, 2), BALANCED)
    feature = ort_accel.report(model).features["distributed.load_balancing.enabled"]
    assert feature.state is State.REFUSED
    assert "LoadBalancingDistributedSampler" in feature.reason
