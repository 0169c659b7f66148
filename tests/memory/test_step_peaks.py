"""`observe.memory_stats`: lines for four phases of a step, and the measured peak."""

import gc
import weakref

import pytest
import torch
from torch import nn

import ort_accel
from ort_accel.memory import process_memory, step_peaks
from ort_accel.memory.step_peaks import StepMemoryWatch
from ort_accel.reporting.report import Report

BATCHED_BYTES = 1 << 20
"""Linux counts pages of the resident set in batches, and /proc may be behind by one of each processor or thread."""

PHASES = ["before forward", "after forward", "after backward", "after step"]


def trained(steps, config, width=8):
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 1))
    ort_accel.accelerate(model, {"observe": {"log_level": "error", "memory_stats": True}} | config)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(4, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def lines(text):
    found = [line.split(" | ") for line in text.splitlines() if "memory (MiB)" in line]
    return [(int(head.split()[2]), phase) for head, phase, *_ in found]


def test_early_steps_and_powers_of_two_have_four_lines(capsys):
    trained(18, {})
    shown = lines(capsys.readouterr().err)
    assert shown == [(step, phase) for step in [*range(10), 16] for phase in PHASES]


def test_evaluation_is_no_step(capsys):
    model = trained(1, {})
    with torch.no_grad():
        model(torch.randn(4, 8))
    assert len(lines(capsys.readouterr().err)) == 4


def test_the_measured_peak_covers_saved_values():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x):
            return (self.inner(x).sin().repeat(1, 32).sin() ** 2).sum()

    model, x = Wide(), torch.randn(4096, 64)
    ours = ort_accel.accelerate(model, {"observe": {"log_level": "error", "memory_stats": True}})
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(5):
        ours(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = ort_accel.report(ours)
    peak, (memory,) = report.measured_peak, report.memory.values()
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert memory.stash >= 2 * 4096 * 64 * 32 * 4
    assert peak.bytes > memory.stash
    assert 3 * parameters <= peak.held < 3 * parameters + 100, "two moments of each parameter, and step counts"
    assert "measured peak of step 3" in str(ort_accel.observe.feature_table.feature_table(report))


def test_steps_that_compile_are_not_measured():
    report = Report()
    watch, model = StepMemoryWatch(report, prints=False), nn.Linear(2, 2)
    for _ in range(5):
        watch.before_forward(model)
        report.counters["compilations"] += 1
    assert report.measured_peak is None
    for _ in range(3):
        watch.before_forward(model)
    assert report.measured_peak.step == 6
    watch.close()


def test_memory_that_the_measured_step_takes_counts():
    report, taken = Report(), []
    watch, model = StepMemoryWatch(report, prints=False), nn.Linear(2, 2)
    for step in range(step_peaks.FIRST_WITHOUT_COMPILING + 3):
        watch.before_forward(model)
        if step > step_peaks.FIRST_WITHOUT_COMPILING:
            taken.append(torch.ones(1 << 24))
    watch.close()
    assert report.measured_peak.in_use >= taken[0].nbytes
    assert report.measured_peak.bytes >= taken[0].nbytes - BATCHED_BYTES


def test_nothing_is_measured_if_the_system_has_no_answer(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(process_memory, "_STATUS", tmp_path / "none")
    report = ort_accel.report(trained(4, {}))
    assert report.measured_peak is None
    assert "resident unknown" in capsys.readouterr().err


def test_the_process_peak_outlasts_a_reset():
    held = torch.ones(1 << 24)
    most = process_memory.resident("VmHWM")
    del held
    assert process_memory.reset_high_water_mark()
    assert process_memory.peak_before_reset() >= most
    assert process_memory.resident("VmHWM") < most


def test_a_deleted_model_is_freed():
    model = trained(2, {})
    seen = weakref.ref(model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert seen() is None


def test_a_model_without_parameters_has_lines(capsys):
    ours = ort_accel.accelerate(nn.GELU(), {"observe": {"log_level": "error", "memory_stats": True}})
    ours(torch.randn(4, 3, requires_grad=True)).sum().backward()
    assert [phase for _, phase in lines(capsys.readouterr().err)] == PHASES[:3]


def test_a_gpu_shows_the_figures_of_its_allocator(monkeypatch):
    told = {
        f"{key}.all.{kind}": 1 << 20 for key in ("allocated_bytes", "reserved_bytes") for kind in ("current", "peak")
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: told)
    figures = step_peaks._figures(torch.device("cuda"))
    assert figures["max cached"] == 1 << 20
    assert figures["inactive"] is None


@pytest.mark.parametrize("wish", [{"memory": {"budget": 1.0}}, {"memory": {}}])
def test_without_memory_stats_no_line_is_printed(wish, capsys):
    trained(1, wish | {"observe": {"log_level": "error"}})
    assert not lines(capsys.readouterr().err)
