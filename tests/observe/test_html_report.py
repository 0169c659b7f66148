"""The page says what the report says, whatever the names in it, and needs nothing but itself."""

import re
from itertools import pairwise

import pytest

from ort_accel.config import Config
from ort_accel.observe.answers import MAX_HINTS
from ort_accel.observe.html_report import SECTIONS, html_report, notebook_report
from ort_accel.reporting.batches import BatchingScheme, InputDensity, Inspection, LoadBalance
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.memory import MeasuredPeak
from ort_accel.reporting.report import Report
from ort_accel.reporting.segments import Runner, Segment
from ort_accel.reporting.series import Series
from ort_accel.reporting.timings import EAGER, ENGINE, StepComparison
from tests.observe.pages import read, table_with

QUESTIONS = ["Did it help?", "What ran where?", "What can be better?"]
NASTY = '<script>alert("x")</script> & <b>'


def full_report():
    made = Report(versions={"ort_accel": "9.8.7", "torch": "2.0"}, config=Config().to_dict())
    made.applied("engine", "onnxruntime 1.2.3")
    made.refused("compute.upstream", "not in this version")
    made.off("memory.level", "not asked for")
    made.segments += [
        Segment("forward 0", Runner.ORT, {"aten.mm": 3}, 3e9),
        Segment("forward 0", Runner.PYTORCH, {"aten.topk": 1}, 1e9),
        Segment("backward 0", Runner.ORT, {"aten.mm": 6}, 6e9),
    ]
    made.fallback("aten.topk", Reason.UNSUPPORTED_OP, "no lowering", where="model.py:7: x.topk(3)")
    made.fallback("aten.bernoulli.p", Reason.RANDOM, count=12)
    made.fallback("a graph break", Reason.GRAPH_BREAK, "print was called", count=2)
    made.timings = {"build sessions": 0.5, "capture": 1.25}
    made.counters["compilations"] = 2
    made.note("the folder is full")
    made.comparison = StepComparison(EAGER, 1.25, 4, 40, eager_seconds=0.2)
    for step, seconds in enumerate([8.0, 0.1, 0.3, 0.2], 1):
        made.measured("ort/step_time", step, seconds)
        made.measured("ort/density", step, 0.5)
    rows = [InputDensity(step, "EMBED", "input_ids", 0, 2 * step, 16, (2, 2 * step - 2)) for step in (3, 4)]
    made.inspection = Inspection(
        rows, 1, [BatchingScheme("dense", 16e9), BatchingScheme("what counts", 6e9)], 2, (0.25, 0.05)
    )
    made.load_balance = LoadBalance([[9.0, 1.0], [8.0, 2.0]], [[5.0, 5.0], [5.0, 5.0]], 1, 0.41, 0.0)
    return made


MEMORY = {
    "graph": "graph 0",
    "level": "1",
    "layers": 2,
    "stash_without": 4 * 2**20,
    "stash": 2**20,
    "repeated": 3,
    "moved": 0,
    "bits": 2**17,
    "masks": 2**20,
    "cost_ms": 0.26,
    "symbols": {"batch": 4},
    "frontier": [
        {"bytes": 8 * 2**20, "resident": 2**20, "cost_ms": 0.0},
        {"bytes": 6 * 2**20, "resident": 2**20, "cost_ms": 0.20},
        {"bytes": 5 * 2**20, "resident": 2**20, "cost_ms": 0.26},
    ],
    "stages": [
        {"phase": phase, "amounts": {"parameters": 2**20, "kept: layer 1": one * 2**20, "kept: layer 2": two * 2**20}}
        for phase, one, two in (("forward", 1, 0), ("forward", 1, 2), ("backward", 1, 3), ("optimizer", 0, 0))
    ],
    "plans": [
        {"cluster": "Gelu+", "kind": 1, "requested": 1, "applied": 1, "frequency": 2, "saving": 2_000,
         "symbolic": "500*batch", "cost_ms": 0.25, "shapes": ["float32 [4, 500]"]},
        {"cluster": "Where+", "kind": 2, "requested": 0, "applied": 0, "frequency": 1, "saving": 1_000,
         "symbolic": "250*batch", "cost_ms": 0.1, "shapes": ["float32 [4, 250]"]},
    ],
}  # fmt: skip
"""What recomputation writes into a report's data."""
RACES = [
    {"graph": "forward", "subject": "gelu", "count": 1, "seconds": {"onnxruntime": 1e-3}, "chosen": "onnxruntime"},
    {"graph": "forward", "subject": "mm", "count": 9,
     "seconds": {"onnxruntime": 2e-3, "pytorch": 1e-3}, "chosen": "pytorch"},
]  # fmt: skip
"""What tuning writes into it."""


def page_of(report):
    return read(html_report({**report.to_dict(), "memory": [MEMORY], "races": RACES}))


def test_every_section_of_a_full_report_is_there_in_its_order():
    assert page_of(full_report()).headings == [*QUESTIONS, *(title for title, _ in SECTIONS)]


def test_the_first_screen_says_that_eager_pytorch_is_faster_and_what_to_set():
    page = page_of(full_report())
    assert (
        "1.25 times as slow A step takes 250 ms, and 200 ms in eager PyTorch. Eager PyTorch runs the steps."
        in page.text
    )
    assert page.text.index("compute.tuning.enabled: true") < page.text.index("compute.upstream")
    assert "1 more stands below." in page.text
    assert len(table_with(page, "key", "because")) == MAX_HINTS + 1


def test_the_first_screen_says_how_many_steps_win_the_set_up_back():
    made = full_report()
    made.comparison = StepComparison(ENGINE, 0.5, 4, 40, eager_seconds=0.5)
    page = page_of(made)
    assert "2.00 times as fast A step takes 250 ms, and 500 ms in eager PyTorch." in page.text
    assert "The set-up took 1.8 s, which 7 steps win back." in page.text
    bars = page.plots["ort_accel beside eager PyTorch: forward and backward, in compared steps"]
    assert bars.bars == [50.0, 100.0]


def test_steps_that_a_script_measured_in_eager_pytorch_are_drawn_beside_ours():
    made = full_report()
    for step in range(1, 5):
        made.measured("eager/step_time", step, 0.75)
    made.measured("ort/memory_growth", 1, 300.0)
    made.measured("eager/memory_growth", 1, 400.0)
    page = page_of(made)
    assert "3.00 times as fast" in page.text
    assert len(page.plots["Seconds of each step"].points) == 2
    assert page.plots["ort_accel beside eager PyTorch: peak memory of the training"].bars == [75.0, 100.0]


def test_what_was_not_compared_is_said_with_the_reason():
    made = Report()
    made.off("engine.compare_with_eager", "switched off")
    assert (
        "Not compared No step was compared with eager PyTorch: switched off." in read(html_report(made.to_dict())).text
    )


def test_each_sides_kernels_have_their_share():
    made = full_report()
    made.segments[0].own_nodes, made.segments[0].called_nodes, made.segments[0].called_flops = 1, 1, 1e9
    assert table_with(page_of(made), "", "FLOPs", "nodes") == [
        ["ONNX Runtime's kernels", "80 %", "70 %"],
        ["ort_accel's native kernels", "0 %", "10 %"],
        ["PyTorch's kernels, called by ONNX Runtime", "10 %", "10 %"],
        ["PyTorch, outside of ONNX Runtime", "10 %", "10 %"],
    ]


def test_a_notebook_shows_the_answers_and_the_sections_folded():
    made = full_report()
    html = made._repr_html_()
    assert html == notebook_report(made)
    page = read(f"<!DOCTYPE html>{html}")
    assert page.headings == QUESTIONS
    assert html.count("<details>") >= len(SECTIONS) - 2
    assert "<script" not in html
    table = read(f"<!DOCTYPE html>{made.fallbacks._repr_html_()}")
    assert table_with(table, "nodes", "operator")[0][1] == "a graph break"
    assert "PyTorch runs no operator" in Report().fallbacks._repr_html_()


def test_every_feature_has_its_state_and_its_sentence():
    page = page_of(full_report())
    rows = [row for rows in page.tables if rows[0][0] == "feature" for row in rows[1:]]
    assert rows == [
        ["engine", "ON", "onnxruntime 1.2.3"],
        ["compute.upstream", "REFUSED", "not in this version"],
        ["memory.level", "OFF", "not asked for"],
    ]


def test_shares_are_those_of_the_segments():
    page = page_of(full_report())
    assert "90 % in ONNX Runtime" in page.text
    bars = page.plots["Nodes"]
    assert [word for word in bars.words if "%" in word] == ["75 % of 4", "100 % of 6"]
    assert bars.bars[0] == pytest.approx(3 * bars.bars[1], rel=0.01)
    assert [row[:4] for row in table_with(page, "graph", "run by")] == [
        ["forward 0", "ONNX Runtime", "3", "3G"],
        ["forward 0", "PyTorch", "1", "1G"],
        ["backward 0", "ONNX Runtime", "6", "6G"],
    ]


def test_fallbacks_stand_apart_from_choices_and_from_graph_breaks():
    page = page_of(full_report())
    forced, choices = [rows[1:] for rows in page.tables if rows[0][:2] == ["nodes", "operator"]]
    assert forced == [["1", "aten.topk", "unsupported operator", "no lowering", "model.py:7: x.topk(3)"]]
    assert choices == [["12", "aten.bernoulli.p", "random", "", ""]]
    assert table_with(page, "times") == [["2", "print was called", ""]]
    assert "ONNX Runtime cannot run aten.topk." in page.text  # a graph break is no node


def test_start_up_is_shown_by_phase_slowest_first():
    page = page_of(full_report())
    [plot] = [plot for label, plot in page.plots.items() if label.startswith("Seconds by phase, 1.75 in all")]
    assert plot.words == ["capture", "1.25 s", "build sessions", "0.50 s"]
    assert plot.bars[0] == pytest.approx(2.5 * plot.bars[1], rel=0.01)


def test_the_typical_step_is_not_the_one_that_compiles():
    report = full_report()
    for step in range(1, 5):
        report.measured("eager/step_time", step, 0.5)
    assert "A step takes 250 ms, and 500 ms in eager PyTorch." in page_of(report).text


def test_a_figure_over_the_steps_has_named_axes_and_a_point_for_each_step():
    plot = page_of(full_report()).plots["Seconds of each step"]
    assert {"step", "seconds"} <= set(plot.words)
    [points] = plot.points
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    heights = [-y for _, y in points]
    assert sorted(range(4), key=heights.__getitem__) == [1, 3, 2, 0]


def test_density_is_shown_by_what_other_batches_would_compute():
    page = page_of(full_report())
    [plot] = [plot for label, plot in page.plots.items() if label.startswith("FLOPs a batch, estimated")]
    assert plot.bars[1] == pytest.approx(plot.bars[0] * 6 / 16, abs=0.1)
    assert {"16G, 100.0%", "6G, 37.5%"} <= set(plot.words)
    assert "2 processes would wait 25.0% of the time for the one with the most tokens, 5.0% with" in page.text
    assert table_with(page, "STEP")[0] == ["3", "EMBED", "input_ids", "0", "37.5%", "6", "16", "[2, 4]"]


def test_memory_is_shown_by_what_is_kept_and_by_its_plans():
    page = page_of(full_report())
    plot = page.plots["What the forward keeps for the backward"]
    assert {"4.0 MiB", "1.0 MiB"} <= set(plot.words)
    assert plot.bars[0] == pytest.approx(4 * plot.bars[1], rel=0.01)
    assert (
        "3 operators are computed again, which takes about 0.3 ms a step. "
        "Of masks 0.1 MiB of bits are kept instead of 1.0 MiB. Sizes: batch = 4."
    ) in page.text
    assert table_with(page, "", "cluster") == [
        ["ON", "Gelu+", "1", "1 of 2", "2,000", "0.25", "500*batch"],
        ["OFF", "Where+", "2", "0 of 1", "1,000", "0.10", "250*batch"],
    ]


def measured_report(in_use=4 * 2**20):
    report = full_report()
    report.measured_peak = MeasuredPeak(step=2, held=2**20, bytes=6 * 2**20, in_use=in_use)
    return report


def test_the_peak_is_shown_as_predicted_and_as_measured():
    plot = page_of(measured_report()).plots["The peak of a step, as predicted and as measured"]
    assert [word for word in plot.words if word.endswith(" MiB")] == ["8.0 MiB", "5.0 MiB", "5.0 MiB", "7.0 MiB"]
    assert {"measured in step 2, in use", "measured in step 2, resident"} <= set(plot.words)
    assert len(page_of(measured_report(None)).plots[plot.label].bars) == len(plot.bars) - 2


def test_a_step_is_drawn_by_what_its_memory_is_for_with_the_measured_peak_as_a_line():
    html = html_report({**measured_report().to_dict(), "memory": [MEMORY]})
    [plot] = [plot for label, plot in read(html).plots.items() if "memory over a step" in label]
    bottom, _, top = plot.points
    low, high = max(y for _, y in bottom), min(y for _, y in bottom)
    assert min(y for _, y in top) == pytest.approx(low - 5 * (low - high), abs=0.2)
    assert {"backward", "optimizer", "measured, in use", "measured, resident"} <= set(plot.words)
    assert html.count("</svg>kept</span>") == 1, "layers have one entry in the key"


def test_the_frontier_is_drawn_over_what_computing_again_costs():
    plot = page_of(measured_report()).plots["The peak of a step, as predicted for each choice that was tried"]
    [points] = plot.points
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted(y for _, y in points), "further down on the page is less"
    assert "ms that this costs in a step, estimated" in plot.words


def test_what_was_timed_is_shown_with_the_choice_and_that_which_costs_most_first():
    assert table_with(page_of(full_report()), "nodes", "measured") == [
        ["9", "forward: mm", "onnxruntime 2, pytorch 1", "pytorch"],
        ["1", "forward: gelu", "onnxruntime 1", "onnxruntime"],
    ]


def test_the_tokens_of_each_batch_are_drawn_with_padding_on_top():
    plot = page_of(full_report()).plots["Tokens of input_ids in the batches of the last density table"]
    valid, padding = plot.points
    (x3, y3), (x4, y4), *_ = valid
    bottom = max(y for _, y in valid)
    assert (bottom - y4) / (bottom - y3) == pytest.approx(8 / 6, rel=0.01)
    assert {y for _, y in padding[:2]} == {min(y for _, y in padding)}
    assert x3 < x4


def test_the_load_of_each_process_is_drawn_before_and_after_on_one_scale():
    page = page_of(full_report())
    before = page.plots["Without balancing: processes wait 41.0% of the time for the one with the most work"]
    after = page.plots["With balancing: processes wait 0.0% of the time for the one with the most work"]
    assert len(before.points) == len(after.points) == 2
    assert {word for word in before.words if word.isdecimal()} == {word for word in after.words if word.isdecimal()}
    assert min(y for line in before.points for _, y in line) < min(y for line in after.points for _, y in line)


def test_many_processes_are_drawn_by_their_mean_and_extremes():
    made = full_report()
    loads = [[float(rank) for rank in range(64)]] * 3
    made.load_balance = LoadBalance(loads, loads, 4, 0.5, 0.5)
    page = page_of(made)
    [plot] = [plot for label, plot in page.plots.items() if label.startswith("Without")]
    band, mean = plot.points
    assert min(y for _, y in band) < min(y for _, y in mean) < max(y for _, y in band)
    assert "one step of 4 is shown" in page.text


def test_an_epoch_without_a_step_has_no_load_to_draw():
    made = full_report()
    made.load_balance = LoadBalance([], [], 1, 0.0, 0.0)
    assert "Load balancing" not in page_of(made).headings


def test_versions_counts_notes_and_the_configuration_are_there():
    page = page_of(full_report())
    assert ["torch", "2.0"] in table_with(page, "", "version")
    assert ["memory.budget", "null"] in table_with(page, "key", "value")
    assert table_with(page, "counted") == [["compilations", "2"]]
    assert "the folder is full" in page.text


def test_names_cannot_break_the_page():
    made = Report(versions={NASTY: NASTY}, config={NASTY: {NASTY: [NASTY]}})
    made.applied(NASTY, NASTY)
    made.refused(NASTY + "2", NASTY)
    made.segments.append(Segment("forward 0", Runner.ORT, {NASTY: 1}, 1.0))
    made.fallback(NASTY, Reason.UNSUPPORTED_OP, NASTY)
    made.fallback("a graph break", Reason.GRAPH_BREAK, NASTY)
    made.timings[NASTY] = 1.0
    made.counters[NASTY] = 1
    made.note(NASTY)
    made.measured(NASTY, 1, 1.0)
    html = html_report(made.to_dict())
    assert NASTY not in html
    assert read(html).text.count(NASTY) >= 10


def test_an_empty_report_is_a_page_that_says_so():
    page = read(html_report(Report().to_dict()))
    assert "Nothing was compiled yet" in page.text
    assert page.plots == {}


def test_a_long_training_is_drawn_with_few_points_that_keep_its_extremes():
    made = Report()
    for step in range(10_000):
        made.measured("ort/step_time", step, 9.0 if step == 7_777 else 1.0 + step % 2)
    html = html_report(made.to_dict())
    assert len(html) < 60_000
    [plot] = read(html).plots.values()
    band, line = plot.points
    assert len(line) <= Series.MAX_POINTS
    assert min(y for _, y in band) < min(y for _, y in line)
    assert "the mean of 32 steps" in plot.label


def test_long_lists_of_fallbacks_are_folded():
    made = full_report()
    for number in range(100):
        made.fallback(f"aten.op_{number}", Reason.UNSUPPORTED_OP)
    html = html_report(made.to_dict())
    assert "61 more kinds" in html
    assert all(f"aten.op_{number}<" in html for number in range(100))


def test_every_colour_of_the_page_is_there_for_light_and_for_dark():
    html = html_report(full_report().to_dict())
    used = set(re.findall(r"var\((--\w+)\)", html))
    assert len(used) > 10
    assert used <= set(re.findall(r"(--\w+): light-dark\(#\w+, #\w+\)", html))


def test_the_page_can_be_read_by_keys_and_by_screen_readers():
    html = html_report(measured_report().to_dict())
    scrolling = re.findall(r'<div class="wide"([^>]*)>', html)
    assert scrolling
    assert all('role="region"' in found and "aria-label=" in found and 'tabindex="0"' in found for found in scrolling)
    assert all('role="img"' in found and "aria-label=" in found for found in re.findall(r'<svg[^>]*class="plot"', html))
    assert not re.search(r"<th(?![^>]*scope=)[ >]", html)
    assert html.count("<h1>") == 1
    levels = [int(level) for level in re.findall(r"<h([1-6])", html)]
    assert all(deeper <= level + 1 for level, deeper in pairwise(levels))
    assert '<html lang="en">' in html
