"""The report keeps what it is told, counts, and turns into plain data."""

import json

import pytest

from ort_accel.reporting.fallbacks import Fallback, Reason
from ort_accel.reporting.report import Report, State
from ort_accel.reporting.segments import Runner, Segment
from ort_accel.reporting.series import Series


def test_a_feature_is_applied_refused_or_off():
    report = Report()
    report.applied("labels", effect="86 % of the head skipped")
    report.refused("padding", reason="the model reads padded positions")
    report.off("tuning")
    assert [(f.name, f.state) for f in report.features.values()] == [
        ("labels", State.APPLIED),
        ("padding", State.REFUSED),
        ("tuning", State.OFF),
    ]
    assert report.features["padding"].reason == "the model reads padded positions"


def test_a_later_verdict_replaces_an_earlier_one():
    report = Report()
    report.applied("padding")
    report.refused("padding", "found unsafe on the third batch")
    assert report.features["padding"].state is State.REFUSED
    assert len(report.features) == 1


def test_fallbacks_are_counted_by_op_and_reason_most_frequent_first():
    report = Report()
    report.fallback("aten.bernoulli", Reason.RANDOM)
    report.fallback("aten.topk", Reason.UNSUPPORTED_OP, count=3)
    report.fallback("aten.topk", Reason.UNSUPPORTED_DTYPE, "float64")
    report.fallback("aten.topk", Reason.UNSUPPORTED_OP)
    assert report.fallbacks == [
        Fallback("aten.topk", Reason.UNSUPPORTED_OP, 4),
        Fallback("aten.bernoulli", Reason.RANDOM, 1),
        Fallback("aten.topk", Reason.UNSUPPORTED_DTYPE, 1, "float64"),
    ]


def test_phases_add_up_and_are_kept_when_the_work_fails():
    report = Report()
    for _ in range(2):
        with report.timed("capture"):
            pass
    with pytest.raises(KeyError), report.timed("lowering"):
        raise KeyError
    assert report.timings["capture"] >= 0
    assert set(report.timings) == {"capture", "lowering"}


def test_a_note_is_kept_once():
    report = Report()
    report.note("recompile limit hit")
    report.note("recompile limit hit")
    assert report.notes == ["recompile limit hit"]


def test_it_survives_json():
    report = Report()
    report.applied("labels", "86 %")
    report.segments.append(Segment("forward 0", Runner.ORT, {"aten.mm": 3, "aten.add": 2}, flops=1e9))
    report.fallback("aten.topk", Reason.UNSUPPORTED_OP, where="model.py:3: x.topk(2)")
    report.fallback("aten.topk", Reason.UNSUPPORTED_OP, where="model.py:9: x.topk(7)")
    report.counters["compilations"] += 2
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["segments"] == [
        {
            "graph": "forward 0",
            "runner": "onnxruntime",
            "nodes": 5,
            "ops": {"aten.mm": 3, "aten.add": 2},
            "flops": 1e9,
        }
    ]
    assert plain["fallbacks"] == [
        {
            "op": "aten.topk",
            "reason": "unsupported operator",
            "count": 2,
            "detail": "",
            "where": "model.py:3: x.topk(2)",
            "is_called": False,
        }
    ]
    assert plain["counters"] == {"compilations": 2}


@pytest.mark.parametrize("steps", [1, 2, 511, 512, 513, 1025, 10_000])
def test_a_series_keeps_few_points_and_loses_neither_steps_nor_extremes(steps):
    series = Series()
    values = [(step * 7919 % 1000) / 10 for step in range(steps)]
    for step, value in enumerate(values, 1):
        series.add(step, value)
    points = series.points
    assert len(points) <= Series.MAX_POINTS
    assert sum(point.count for point in points) == steps
    assert sum(point.mean * point.count for point in points) == pytest.approx(sum(values))
    assert (min(point.low for point in points), max(point.high for point in points)) == (min(values), max(values))
    ends = [point.step + point.count for point in points]
    assert [point.step for point in points] == [1, *ends[:-1]]
    assert len({point.count for point in points[:-1]}) <= 1


def test_entries_of_a_graph_are_taken_from_one_report_and_added_to_another():
    report = Report()
    report.note("before")
    report.fallback("aten.topk", Reason.UNSUPPORTED_OP, where="model.py:3")
    before = report.graph_entries()
    report.note("of the graph")
    report.applied("padding")
    report.fallback("aten.topk", Reason.UNSUPPORTED_OP, count=2, where="model.py:8")
    report.segments.append(Segment("forward 0", Runner.ORT, {"aten.mm": 1}))
    report.counters["compilations"] += 1
    added = report.graph_entries(since=before)
    assert before.fallbacks == [Fallback("aten.topk", Reason.UNSUPPORTED_OP, 1)], "a copy stays as it was"

    other = Report()
    other.add(added)
    assert other.fallbacks == [Fallback("aten.topk", Reason.UNSUPPORTED_OP, 2)]
    assert other.fallbacks[0].where == "model.py:3"
    assert (other.notes, list(other.features), other.segments) == (["of the graph"], ["padding"], report.segments)
    assert other.counters == {"compilations": 1}
