"""The feature table says what the report says: all of it, in any width, with or without a terminal."""

import re

import pytest
from rich.console import Console

from ort_accel.observe.feature_table import fallback_table, feature_table, render
from ort_accel.observe.headline import headline, percent, work_summary
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.report import Report
from ort_accel.reporting.segments import Runner, Segment
from ort_accel.reporting.timings import EAGER, ENGINE, Race, StepComparison


def report(**fallbacks):
    made = Report(versions={"ort_accel": "9.8.7", "torch": "2.0"})
    made.applied("engine", "onnxruntime 1.2.3, 5 threads")
    made.refused("compute.upstream", "not in [this] version")
    made.off("memory.level", "not asked for")
    made.segments += [
        Segment("forward 0", Runner.ORT, {"aten.mm": 3}, 3e9),
        Segment("forward 0", Runner.PYTORCH, {"aten.topk": 1}, 1e9),
        Segment("backward 0", Runner.ORT, {"aten.mm": 6}, 6e9),
    ]
    made.fallback("aten.topk", Reason.UNSUPPORTED_OP, "no lowering")
    made.fallback("aten.bernoulli.p", Reason.RANDOM, count=12)
    made.timings = {"capture": 1.25, "build sessions": 0.5}
    made.counters["compilations"] = 2
    made.note("the folder is full")
    return made


def row(table, start):
    [line] = [line for line in table.splitlines() if line.strip().startswith(start)]
    return " ".join(line.split())


def test_every_feature_has_its_state_and_its_sentence():
    table = feature_table(report())
    assert row(table, "engine") == "engine ON onnxruntime 1.2.3, 5 threads"
    assert row(table, "compute.upstream") == "compute.upstream REFUSED not in [this] version"
    assert row(table, "memory.level") == "memory.level OFF not asked for"


def test_shares_are_those_of_the_segments():
    table = feature_table(report())
    assert row(table, "forward") == "forward 3 of 4 75 % 3.000 of 4.000 75 % 1 2"
    assert row(table, "backward") == "backward 6 of 6 100 % 6.000 of 6.000 100 % 1 1"
    assert row(table, "all") == "all 9 of 10 90 % 9.000 of 10.000 90 % 2 3"
    assert "inference" not in table


def test_there_is_a_line_for_each_sides_kernels():
    made = report()
    made.segments[0].called_nodes, made.segments[0].own_nodes = 2, 1
    made.segments[0].called_flops = 2e9
    table = feature_table(made, width=120)
    assert row(table, "ONNX Runtime's kernels") == "ONNX Runtime's kernels 6 60 % 7.00 70 %"
    assert row(table, "ort_accel's native kernels") == "ort_accel's native kernels 1 10 % 0.00 0 %"
    assert row(table, "PyTorch's kernels, called") == "PyTorch's kernels, called by ONNX Runtime 2 20 % 2.00 20 %"
    assert row(table, "PyTorch, outside") == "PyTorch, outside of ONNX Runtime 1 10 % 1.00 10 %"
    assert "native kernels" not in feature_table(Report())


def test_a_comparison_with_eager_pytorch_stands_at_the_top():
    made = report()
    made.comparison = StepComparison(ENGINE, 0.5, 4, 40, 0.4)
    top, _ = feature_table(made).split("what ran where")
    assert "0.50 times as long on the engine as in eager PyTorch" in " ".join(top.split())
    made.comparison = StepComparison(EAGER, 1.5, 4, 40, 0.4)
    assert feature_table(made).count("1.50 times as long") == 1


def test_what_to_try_next_stands_at_the_end_with_the_key_to_set():
    table = feature_table(report(), width=160)
    _, end = table.split("what to try next")
    assert "aten.topk" in end
    assert "engine.fallback: error" in end


def test_a_list_of_fallbacks_reads_as_a_table():
    found = report().fallbacks
    assert repr(found) == str(found) == fallback_table(found)
    assert "aten.topk: unsupported operator" in repr(found)
    assert repr(Report().fallbacks) == "PyTorch runs no operator of the compiled graphs."
    assert found == list(found)


def test_what_cannot_run_stands_apart_from_choices():
    forced, choices = feature_table(report()).split("PyTorch runs by choice")
    assert "1  aten.topk: unsupported operator: no lowering" in forced
    assert "12  aten.bernoulli.p: random" in choices
    assert "aten.bernoulli" not in forced


def test_what_was_measured_stands_with_its_figures_the_longest_first():
    made = report()
    made.races.append(Race("forward 0", "aten.exp of 8 x 8", 3, {"onnxruntime": 0.002, "pytorch": 0.001}, "pytorch"))
    made.races.append(Race("forward 0", "the whole graph", 1, {"PyTorch alone": 0.0255}, "PyTorch alone"))
    table = feature_table(made, width=200)
    assert row(table, "3") == "3 forward 0: aten.exp of 8 x 8 onnxruntime 2, pytorch 1 pytorch"
    assert row(table, "1  forward 0") == "1 forward 0: the whole graph PyTorch alone 25.5 PyTorch alone"
    assert table.index("whole graph") < table.index("aten.exp of")
    assert "measured" not in feature_table(report())


def test_times_counters_versions_and_notes_are_there():
    table = feature_table(report())
    assert row(table, "set-up") == "set-up 1.75 s: capture 1.25, build sessions 0.50"
    assert row(table, "counted") == "counted compilations 2"
    assert row(table, "versions") == "versions ort_accel 9.8.7, torch 2.0"
    assert row(table, "note") == "note the folder is full"


def test_the_short_table_cuts_long_lists_and_counts_features_that_are_off():
    made = report()
    for number in range(30):
        made.fallback(f"aten.op_{number:02}", Reason.UNSUPPORTED_OP, count=100 - number)
    short, long = feature_table(made, everything=False), feature_table(made)
    assert "aten.op_00" in short
    assert "aten.op_29" not in short
    assert row(short, str(sum(100 - number for number in range(10, 30)) + 1)).endswith("21 more kinds")
    assert row(short, "1 others").startswith("1 others OFF")
    assert "memory.level" not in short
    assert "aten.op_29" in long


def test_the_most_frequent_comes_first():
    made = report()
    made.fallback("aten.often", Reason.UNSUPPORTED_OP, count=50)
    table = feature_table(made)
    assert table.index("aten.often") < table.index("aten.topk")


def test_a_model_that_was_not_called_says_so():
    assert "Nothing was compiled yet" in feature_table(Report())


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_line_is_wider_than_the_screen_and_nothing_is_cut_off(width):
    table = feature_table(report(), width=width)
    assert max(map(len, table.splitlines())) <= width
    assert "onnxruntime 1.2.3, 5 threads" in " ".join(re.sub(r"\s+", " ", table).split()) or width < 60


@pytest.mark.parametrize("variable", ["NO_COLOR", "TERM"])
def test_without_colour_it_is_plain_text(variable, monkeypatch):
    monkeypatch.setenv(variable, "dumb")
    console = Console(force_terminal=True, width=100)
    with console.capture() as shown:
        console.print(render(report()))
    assert "\x1b[3" not in shown.get()
    assert "engine" in shown.get()


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 10, "0 %"), (10, 10, "100 %"), (9999, 10000, "> 99 %"), (1, 10000, "< 1 %"), (1, 2, "50 %"), (0, 0, "-")],
)
def test_only_all_is_100_percent_and_only_nothing_is_0(part, whole, text):
    assert percent(part, whole) == text


def test_the_title_says_who_runs_how_much_and_never_more():
    assert "***** ort_accel 9.8.7: 90 % of the work on ONNX Runtime *****" in feature_table(report())
    made = report()
    for segment in made.segments:
        segment.runner = Runner.PYTORCH
    assert work_summary(made) == "PyTorch runs all of the work (mostly random), ONNX Runtime 0 %"
    made.fallback("a graph break", Reason.GRAPH_BREAK, "print")
    assert work_summary(made).endswith("ONNX Runtime 0 %, and 1 place of the model in eager PyTorch")


def test_code_outside_of_graphs_is_not_counted_and_said():
    made = report()
    for detail in ("print", "a set"):
        made.fallback("a graph break", Reason.GRAPH_BREAK, detail)
    assert headline(made) == (
        "90 % of the captured work on ONNX Runtime, and 2 places of the model in eager PyTorch, set up in 1.8 s; "
        "details: print(ort_accel.report(model))"
    )


def test_without_matrix_products_the_operators_count():
    made = Report()
    made.segments += [Segment("forward 0", Runner.ORT, {"aten.exp": 3}), Segment("forward 0", Runner.PYTORCH, {"a": 1})]
    assert work_summary(made) == "75 % of the work on ONNX Runtime"


def test_a_model_that_was_declined_says_why():
    made = Report()
    made.refused("engine", "it is on a TPU")
    assert work_summary(made) == "PyTorch runs this model: it is on a TPU"


def test_printing_a_report_shows_its_table_and_its_repr_is_short():
    made = report()
    assert str(made) == feature_table(made)
    assert len(repr(made)) < 130
    assert "3 segments" in repr(made)
