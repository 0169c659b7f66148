"""A second start takes compiled graphs from the cache, gives the same bits, and takes nothing that it cannot trust."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from ort_accel.compiler import settings
from ort_accel.compiler.module_call import TRACE_AND_FIRST_RUN

HOUSE = Path(__file__).parents[2]

SCRIPT = """
import hashlib, json, sys
import torch
from torch import nn
import ort_accel

class Layer(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)
        self.drop, self.scale = nn.Dropout(0.1), scale

    def forward(self, x):
        return self.norm(x + self.drop(self.second(torch.nn.functional.gelu(self.first(x) * self.scale))))

class Model(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.words, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.layers = nn.ModuleList([Layer(scale), Layer(scale)])

    def forward(self, ids, labels):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.view(-1, 50), labels.view(-1)), logits

def train(how):
    torch.manual_seed(0)
    model = ort_accel.accelerate(Model(how.get("scale", 1.0)), how["config"])
    if how.get("frozen"):
        model.words.requires_grad_(False)
    optimizer = getattr(torch.optim, how["optimizer"])(model.parameters()) if "optimizer" in how else None
    numbers, found = torch.Generator().manual_seed(1), []
    torch.manual_seed(5)
    for length in how.get("lengths", [8, 8]):
        ids = torch.randint(0, 50, (4, length), generator=numbers)
        labels = ids.clone()
        labels[:, length // how.get("labelled", 4):] = -100
        with torch.autocast("cpu", torch.bfloat16, enabled=how.get("autocast", False)):
            loss, _ = model(ids, labels)
        loss.backward()
        gradients = [b"none" if p.grad is None else p.grad.numpy().tobytes() for p in model.parameters()]
        found.append([loss.item(), hashlib.sha256(b"".join(gradients)).hexdigest()])
    if how.get("evaluate"):
        model.eval()
        with torch.no_grad():
            found.append(model(ids, labels)[0].item())
    return found, ort_accel.report(model).to_dict()

if __name__ == "__main__":
    print("FOUND", json.dumps(train(json.loads(sys.argv[1]))))
"""


class Start:
    """What one start of the training gave."""

    def __init__(self, numbers, report):
        self.numbers, self.report = numbers, report
        self.counters, self.notes = report["counters"], report["notes"]

    @property
    def compiled(self) -> int:
        return self.counters.get("compilations", 0)

    @property
    def taken(self) -> int:
        return self.counters.get("graphs from an earlier start", 0)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Trains as a start would. Nothing passes from one to the next but the folder and the key."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))

    def run(in_a_process=False, **how):
        engine = {"cache_dir": str(run.cache), "compare_with_eager": False, **how.pop("engine", {})}
        how["config"] = {"version": 1, "engine": engine, **how.get("config", {})}
        if not in_a_process:
            return Start(*trained(run.script, how))
        ended = subprocess.run(
            [sys.executable, str(run.script), json.dumps(how)],
            env={**os.environ, "PYTHONPATH": str(HOUSE)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        (line,) = (line for line in ended.stdout.splitlines() if line.startswith("FOUND"))
        return Start(*json.loads(line.removeprefix("FOUND ")))

    run.script, run.cache = tmp_path / "train.py", tmp_path / "cache"
    run.script.write_text(SCRIPT)
    return run


def trained(script: Path, how: dict):
    """Trains in this process as in a new one."""
    torch._dynamo.reset()
    specification = spec_from_file_location("script_of_a_start", script)
    module = module_from_spec(specification)
    sys.modules[specification.name] = module  # where Dynamo looks for the globals of the model's classes
    specification.loader.exec_module(module)
    return module.train(how)


def graphs(start) -> list[Path]:
    return sorted(start.cache.glob("*.graph"))


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"lengths": [8, 12, 16, 12]},
        {"autocast": True},
        {"labelled": 1, "evaluate": True, "engine": {"compile_evaluation": True}},
        {"config": {"memory": {"level": 1}}},
        {"config": {"density": {"labels": False}, "compute": {"loss_only": False}}, "frozen": True},
        {"config": {"compute": {"placement": "onnxruntime"}}},
    ],
    ids=["plain", "lengths", "bf16", "evaluation", "recompute", "whole", "onnxruntime"],
)
def test_a_second_start_compiles_nothing_and_gives_the_same_bits(start, how):
    assert_taken_again(start, start(**how), start(**how))


def test_a_second_process_does_so_too(start):
    how = {"lengths": [8, 12, 16, 12], "in_a_process": True}
    assert_taken_again(start, start(**how), start(**how))


def assert_taken_again(start, first, second):
    assert first.compiled > 0 == first.taken, first.notes
    assert first.counters["graphs kept for the next start"] == len(graphs(start))
    assert second.compiled == 0, second.notes
    assert second.taken == len(graphs(start))
    assert second.numbers == first.numbers
    assert set(second.report["timings"]) <= {"capture", TRACE_AND_FIRST_RUN}, "a phase behind Dynamo ran"
    for said in ("segments", "fallbacks", "memory"):
        assert second.report[said] == first.report[said]


def test_without_the_folder_nothing_is_taken(start):
    first, second = start(engine={"cache_dir": None}), start(engine={"cache_dir": None})
    assert first.compiled == second.compiled > 0 == second.taken
    assert second.numbers == first.numbers


@pytest.mark.parametrize(
    "other",
    [
        {"config": {"memory": {"level": 1}}},
        {"scale": 2.0},
        {"frozen": True},
        {"autocast": True},
        {"lengths": [6, 6]},
    ],
    ids=["configuration", "constant", "frozen", "autocast", "sizes"],
)
def test_whatever_decides_the_result_leads_to_another_graph(start, other):
    start()
    assert graphs(start)
    assert start(**other).taken == 0


def test_under_a_budget_another_optimizer_leads_to_another_graph(start):
    config = {"memory": {"budget": "1GiB"}}
    start(config=config, optimizer="AdamW")
    assert graphs(start)
    assert start(config=config, optimizer="AdamW").taken > 0
    assert start(config=config, optimizer="SGD").taken == 0


def test_another_variable_of_a_library_leads_to_another_graph(start, monkeypatch):
    start()
    assert graphs(start)
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    assert start().taken == 0


def test_another_onnxruntime_leads_to_another_graph(start, monkeypatch):
    start()
    assert graphs(start)
    other = dataclasses.replace(settings.installed_runtime(), version="1.0")
    monkeypatch.setattr(settings, "installed_runtime", lambda: other)
    assert start().taken == 0


def test_a_changed_line_of_the_model_leads_to_another_graph(start):
    start()
    assert graphs(start)
    start.script.write_text(SCRIPT.replace("functional.gelu(", "functional.silu("))
    changed = start()
    assert changed.taken == 0 < changed.compiled


def test_another_version_of_the_engine_leads_to_another_graph(start, tmp_path, monkeypatch):
    from ort_accel.graph_cache import fingerprint

    source = tmp_path / "engine"
    source.mkdir()
    (source / "__init__.py").write_text("one = 1\n")
    monkeypatch.setattr(fingerprint.ort_accel, "__file__", str(source / "__init__.py"))
    before = fingerprint._software.__wrapped__()
    (source / "__init__.py").write_text("one = 2\n")
    changed = fingerprint._software.__wrapped__()
    (source / "library.so").write_bytes(b"kernels")
    assert len({before, changed, fingerprint._software.__wrapped__()}) == 3


class Harm:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content, _: content[: len(content) // 2],
        lambda content, _: b"",
        lambda content, harm: harm,
        lambda content, harm: content[:51] + harm,
        lambda content, harm: content + harm,
        lambda content, _: content[:-1] + bytes([content[-1] ^ 1]),
    ],
    ids=["truncated", "empty", "bare pickle", "under another's signature", "longer", "one bit"],
)
def test_an_altered_file_is_never_unpickled(start, tmp_path, damage):
    first = start()
    mark = tmp_path / "mark"
    for path in graphs(start):
        path.write_bytes(damage(path.read_bytes(), pickle.dumps(Harm(mark))))
    second = start()
    assert second.taken == 0
    assert second.compiled == first.compiled
    assert any("somebody else has written it" in note for note in second.notes)
    assert not mark.exists()
    assert second.numbers == first.numbers
    assert start().taken == len(graphs(start)), "it was made again"


def test_what_another_user_wrote_is_not_taken(start, tmp_path, monkeypatch):
    start()
    assert graphs(start)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another's home"))
    other = start()
    assert other.taken == 0 < other.compiled


def test_a_file_under_another_name_is_not_taken(start):
    first = start()
    assert graphs(start), first.notes
    (one,) = graphs(start)
    content = one.read_bytes()
    one.unlink()
    start(lengths=[6, 6])
    (other,) = graphs(start)
    other.write_bytes(content)
    assert start(lengths=[6, 6]).taken == 0


@pytest.mark.parametrize("mode", [0o644, 0o640])
def test_a_key_that_others_can_read_signs_nothing(start, tmp_path, mode):
    start()
    key = tmp_path / "home" / "ort_accel" / "cache.key"
    assert key.stat().st_mode & 0o777 == 0o600
    key.chmod(mode)
    open_key = start()
    assert open_key.taken == 0 < open_key.compiled
    assert any("open to, other users" in note for note in open_key.notes)
