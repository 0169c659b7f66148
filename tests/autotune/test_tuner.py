"""The tuner divides by measurements, reports them, and finds them again in a file."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ort_accel.autotune import handover_cost
from ort_accel.autotune.node_kinds import Kind
from ort_accel.autotune.timer import SavedTimings, Stopwatch
from ort_accel.autotune.tuner import ALONE, FEATURE, UNMEASURED, Tuner
from ort_accel.compiler.compile_graph import Lowering, lower_graph
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.report import Report, State
from ort_accel.reporting.segments import Runner
from ort_accel.runtime.session import SessionSettings
from ort_accel.runtime.sessions import Sessions

OPSET = 20
SETTINGS = SessionSettings(threads=1)
HANDOVER = {handover_cost.WORK: 0.0, handover_cost.BOTH: 0.2, handover_cost.ORT: 0.0, handover_cost.PYTORCH: 0.0}
"""One handover takes 0.1 s."""


class RunsOfAKind(dict):
    """Runs that name their kind."""

    subject = ""


@pytest.fixture(autouse=True)
def runs_name_their_kind(monkeypatch):
    runs_of = Kind.runs

    def named(kind, *given):
        runs = RunsOfAKind(runs_of(kind, *given))
        runs.subject = kind.subject
        return runs

    monkeypatch.setattr(Kind, "runs", named)


class Figures(Stopwatch):
    """Runs everything once and reads the times from tables: (ONNX Runtime, PyTorch) of operators, and whole graphs."""

    def __init__(self, whole=None, limit=float("inf"), **operators) -> None:
        super().__init__(limit)
        self.whole, self.operators, self.asked = whole or {}, operators, []

    def race(self, runs, share=1.0, in_a_row=1):
        if not self.left:
            return None
        for run in runs.values():
            run()
        if runs.keys() == HANDOVER.keys():
            self.asked.append("a handover")
            return HANDOVER
        if UNMEASURED in runs:
            self.asked.append("a graph")
            usual = {UNMEASURED: 1.0, ALONE: 1.5}
            return {label: self.whole.get(label, usual.get(label, 0.5)) for label in runs}
        self.asked.append(runs.subject)
        ours, theirs = self.operators.get(runs.subject.split(".")[1], (1.0, 2.0))
        return {Runner.ORT.value: ours, Runner.PYTORCH.value: theirs}


class Tuned:
    """A function lowered with these figures."""

    def __init__(self, function, *inputs, figures, path=None, only_saved=False, dynamic=False) -> None:
        self.report, self.figures = Report(), figures
        results = SavedTimings(path, "here", self.report)
        tuner = Tuner(OPSET, Sessions(SETTINGS), figures, results, self.report, only_saved)
        lowering = Lowering(Sessions(SETTINGS), OPSET, self.report, tuner=tuner)
        traced = make_fx(lambda *x: [function(*x)], tracing_mode="symbolic" if dynamic else "fake")(*inputs)
        self.program = lower_graph(traced, lowering, "forward 0")
        self.feature = self.report.features.get(FEATURE)

    @property
    def in_pytorch(self) -> set[str]:
        ours = {item.op for item in self.report.fallbacks if item.reason is Reason.SLOWER}
        return {op.split(".")[1] for op in ours}

    def __call__(self, *inputs):
        return self.program(list(inputs))[0]


def layers(x, y):
    """Products with a function of single elements between them."""
    return x.mm(y).exp().mm(y).sin()


INPUTS = (torch.randn(300, 256), torch.randn(256, 256) / 50)


@pytest.mark.parametrize("dynamic", [False, True])
def test_each_operator_runs_where_it_is_fast_if_that_pays_the_handover(dynamic):
    tuned = Tuned(layers, *INPUTS, figures=Figures(exp=(1.0, 0.1), sin=(0.15, 0.1)), dynamic=dynamic)
    assert tuned.in_pytorch == {"exp"}
    torch.testing.assert_close(tuned(*INPUTS), layers(*INPUTS))


def test_a_slightly_faster_kernel_is_not_worth_two_handovers():
    assert Tuned(layers, *INPUTS, figures=Figures(exp=(1.0, 0.99))).in_pytorch == set()


def test_the_time_of_the_whole_graph_decides():
    exp = {"exp": (1.0, 0.1)}
    alone = Tuned(layers, *INPUTS, figures=Figures({ALONE: 0.4}, **exp))
    assert {item.runner for item in alone.report.segments} == {Runner.PYTORCH}
    as_before = Tuned(layers, *INPUTS, figures=Figures({UNMEASURED: 0.4}, **exp))
    assert {item.runner for item in as_before.report.segments} == {Runner.ORT}
    for tuned in (alone, as_before):
        torch.testing.assert_close(tuned(*INPUTS), layers(*INPUTS))


def test_pytorch_alone_is_preferred_to_divisions_hardly_faster():
    exp = {"exp": (1.0, 0.1)}
    assert Tuned(layers, *INPUTS, figures=Figures({ALONE: 0.505}, **exp)).in_pytorch == {"mm", "exp", "sin"}
    assert Tuned(layers, *INPUTS, figures=Figures({ALONE: 0.52}, **exp)).in_pytorch == {"exp"}


def test_every_decision_is_in_the_report_with_its_figures():
    tuned = Tuned(layers, *INPUTS, figures=Figures({ALONE: 0.75, UNMEASURED: 0.8}, exp=(1.0, 0.1)))
    measured = {item.subject.split(" ")[0]: item for item in tuned.report.races}
    exp, product = measured["aten.exp.default"], measured["aten.mm.default"]
    assert (exp.seconds, exp.chosen, exp.count) == ({"onnxruntime": 1.0, "pytorch": 0.1}, "pytorch", 1)
    assert (product.chosen, product.count) == ("onnxruntime", 2)
    assert measured["the"].seconds == {UNMEASURED: 0.8, ALONE: 0.75, "divided by measurement": 0.5}
    [fallback] = tuned.report.fallbacks
    assert (fallback.op, fallback.reason, fallback.detail) == (
        "aten.exp.default",
        Reason.SLOWER,
        "100 ms in PyTorch, 1e+03 ms in ONNX Runtime",
    )
    assert tuned.feature.state is State.APPLIED
    assert tuned.feature.effect.startswith("forward 0: 500 ms divided by measurement; 800 ms as chosen without")


def test_nodes_that_are_alike_are_measured_once():
    figures = Figures()
    Tuned(lambda x, y: x.mm(y).mm(y).mm(y), *INPUTS, figures=figures)
    assert [subject for subject in figures.asked if ".mm." in subject] == [
        "aten.mm.default of 300 x 256, 256 x 256 (float32)"
    ]


def test_operators_on_other_sizes_and_layouts_are_measured_apart():
    figures = Figures()
    Tuned(lambda x, y: x.mm(y).mm(y.t()).mm(y[:, :8]), *INPUTS, figures=figures)
    assert sum(".mm." in subject for subject in figures.asked) == 3


def test_results_are_loaded_instead_of_measured(tmp_path):
    path = tmp_path / "tuning.json"
    first = Tuned(layers, *INPUTS, figures=Figures(exp=(1.0, 0.1)), path=path)
    second = Tuned(layers, *INPUTS, figures=Figures(), path=path)
    assert second.figures.asked == []
    assert second.in_pytorch == first.in_pytorch == {"exp"}
    assert second.report.races == first.report.races
    torch.testing.assert_close(second(*INPUTS), first(*INPUTS), rtol=0, atol=0)


def test_a_graph_that_differs_is_measured_where_it_differs(tmp_path):
    path = tmp_path / "tuning.json"
    Tuned(layers, *INPUTS, figures=Figures(), path=path)
    other = Tuned(lambda x, y: layers(x, y).cos(), *INPUTS, figures=Figures(), path=path)
    assert [subject.split(" ")[0] for subject in other.figures.asked] == ["aten.cos.default", "a"]


def test_a_deterministic_run_follows_a_file_and_measures_nothing(tmp_path):
    path = tmp_path / "tuning.json"
    without = Tuned(layers, *INPUTS, figures=Figures(exp=(1.0, 0.1)), path=path, only_saved=True)
    assert without.figures.asked == []
    assert without.in_pytorch == set()
    assert without.feature.state is State.REFUSED
    assert "compute.tuning.results" in without.feature.reason
    Tuned(layers, *INPUTS, figures=Figures(exp=(1.0, 0.1)), path=path)
    followed = Tuned(layers, *INPUTS, figures=Figures(), path=path, only_saved=True)
    assert followed.figures.asked == []
    assert followed.in_pytorch == {"exp"}
    assert followed.feature.state is State.APPLIED


def test_without_time_left_the_choice_is_the_usual_one():
    tuned = Tuned(layers, *INPUTS, figures=Figures({ALONE: 0.1}, limit=0.0, exp=(1.0, 0.1)))
    assert tuned.in_pytorch == set()
    assert tuned.feature.state is State.REFUSED
    assert "max_duration_ms is spent" in tuned.feature.reason


@torch.library.custom_op("tuning_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(x.shape)
    return x.clone()


@counted.register_fake
def _(x):
    return torch.empty_like(x)


CALLS = []


def test_an_operator_that_might_do_more_than_compute_is_not_run_for_measuring():
    CALLS.clear()
    tuned = Tuned(lambda x, y: layers(counted(x), y), *INPUTS, figures=Figures(exp=(1.0, 0.1)))
    assert CALLS == []
    assert "tuning_tests.counted.default may do more than compute" in tuned.feature.reason
    torch.testing.assert_close(tuned(*INPUTS), layers(*INPUTS))


def test_a_measurement_that_fails_leaves_the_usual_division():
    class Failing(Figures):
        def race(self, *_, **__):
            raise RuntimeError("no memory")

    tuned = Tuned(layers, *INPUTS, figures=Failing(exp=(1.0, 0.1)))
    assert "measuring failed with RuntimeError: no memory" in tuned.feature.reason
    torch.testing.assert_close(tuned(*INPUTS), layers(*INPUTS))


def test_measuring_draws_no_random_numbers():
    def dropped(x, y):
        return torch.bernoulli(x.mm(y).sigmoid()).mm(y)

    torch.manual_seed(0)
    before = torch.get_rng_state()
    tuned = Tuned(dropped, *INPUTS, figures=Figures())
    assert "a graph" in tuned.figures.asked
    assert torch.equal(torch.get_rng_state(), before)
