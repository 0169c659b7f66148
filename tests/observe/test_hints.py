"""Each hint appears where a report gives the reason for it, and its line of YAML is a configuration that loads."""

from collections.abc import Callable

import pytest

from ort_accel.config import Config, load_config
from ort_accel.observe.hints import RULES, Hint, hints
from ort_accel.reporting.batches import BatchingScheme, Inspection
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.memory import GraphMemory
from ort_accel.reporting.report import Report
from ort_accel.reporting.timings import EAGER, ENGINE, StepComparison


def found(change: Callable[[Report], object] = lambda report: None, **sections: object) -> list[Hint]:
    report = Report(config=load_config(sections).to_dict())
    change(report)
    return hints(report.to_dict())


def padded(report: Report) -> None:
    report.measured("ort/density", 1, 0.4)
    report.off("density.padding", "a sum reads every row")


def waiting(report: Report) -> None:
    report.inspection = Inspection([], 1, [BatchingScheme("dense", 1.0)], 2, (0.3, 0.02))


def kept(report: Report) -> None:
    report.memory["graph 0"] = GraphMemory("graph 0", "auto", stash=200 * 2**20)


REASONS: dict[str, tuple[Callable[[Report], object], list[str]]] = {
    "_eager_is_faster": (
        lambda report: setattr(report, "comparison", StepComparison(EAGER, 1.3, 4, 9)),
        ["compute.tuning.enabled: true"],
    ),
    "_refused": (lambda report: report.refused("native library", "there is no compiler"), [""]),
    "_graph_breaks": (
        lambda report: report.fallback("a graph break", Reason.GRAPH_BREAK, "print", 2, "model.py:7"),
        ["engine.fallback: error"],
    ),
    "_cannot_run": (
        lambda report: report.fallback("aten.topk", Reason.UNSUPPORTED_OP),
        ["engine.fallback: error"],
    ),
    "_recompiles": (lambda report: report.counters.update(compilations=9), ["engine.dynamic_shapes: true"]),
    "_set_up": (lambda report: report.timings.update(capture=12.0), ["engine.cache_dir: out/ort_accel_cache"]),
    "_padding": (padded, ["density.padding: true", "density.inspect: true"]),
    "_waiting": (waiting, ["distributed.load_balancing.enabled: true"]),
    "_memory": (kept, ["memory.level: 1"]),
}


@pytest.mark.parametrize("rule", [rule.__name__ for rule in RULES])
def test_a_rule_speaks_where_it_has_a_reason_and_names_keys_that_load(rule: str) -> None:
    change, expected = REASONS[rule]
    given = found(change)
    assert [hint.yaml for hint in given] == expected
    for hint in given:
        assert hint.text.endswith((".", ").")), hint.text
        if hint.yaml:
            path, _, value = hint.yaml.partition(": ")
            tree: object = {"true": True, "1": 1}.get(value, value)
            for name in reversed(path.split(".")):
                tree = {name: tree}
            assert load_config(tree) != Config()  # type: ignore[arg-type]


def test_a_report_without_a_reason_has_no_hint() -> None:
    assert found() == []
    assert found(lambda report: setattr(report, "comparison", StepComparison(ENGINE, 0.5, 4, 9))) == []


def test_what_is_configured_already_is_no_hint() -> None:
    assert found(lambda report: report.timings.update(capture=12.0), engine={"cache_dir": "out/cache"}) == []
    assert found(kept, memory={"level": 1}) == []
    assert found(lambda report: report.counters.update(compilations=9), engine={"dynamic_shapes": True}) == []
