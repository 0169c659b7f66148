"""The grammar of recomputation plans."""

from __future__ import annotations

import pytest

from ort_accel.config.plan_text import Plan, PlanError, join_plans, parse_plans, read_plan_file


@pytest.mark.parametrize("text", ["BiasGelu+:1:-1", "Reshape+Where+BiasSoftmax+:2:3", "Gelu+:0:1"])
def test_a_plan_is_written_as_it_is_read(text):
    assert str(Plan.parse(text)) == text


def test_commas_join_plans():
    assert parse_plans("A+:1:-1,B+C+:2:4") == (Plan("A+", 1, -1), Plan("B+C+", 2, 4))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A+:1",
        "A+:1:1:1",
        "A:1:1",
        "+:1:1",
        "A+ :1:1",
        "A+:3:1",
        "A+:-1:1",
        "A+:1:0",
        "A+:1:-2",
        "A+:1:01",
        "A+:1:1,",
        "A+:1:x",
    ],
)
def test_anything_else_is_an_error_that_shows_a_plan(text):
    with pytest.raises(PlanError, match="such as BiasGelu"):
        parse_plans(text)


def test_one_cluster_has_one_plan(errors):
    assert join_plans(["A+:1:1", "A+:1:1,B+:1:1"]) == (Plan("A+", 1, 1), Plan("B+", 1, 1))
    assert errors("memory:\n  plans: ['A+:1:1', 'A+:2:1']\n") == [
        "x.yaml:2:10: memory.plans: A+:1:1 and A+:2:1 say different things of one cluster; keep one of them"
    ]


def test_a_wrong_plan_is_located_in_its_list(errors):
    assert errors("memory:\n  plans:\n    - A+:1:1\n    - B+:1\n")[0].startswith(
        "x.yaml:4:7: memory.plans[1]: 'B+:1' is not three"
    )


@pytest.mark.parametrize(
    "content", [b"", b"{", b"{}", b"[1]", b'["A+:1"]', b'["A+:1:1", "A+:2:1"]', b"\xff", b"[" * 100_000, b"9" * 5000]
)
def test_a_wrong_plan_file_is_an_error_that_names_it(tmp_path, content):
    file = tmp_path / "plans.json"
    file.write_bytes(content)
    with pytest.raises(PlanError, match=r"plans\.json"):
        read_plan_file(file)


def test_a_plan_file_is_read(tmp_path):
    file = tmp_path / "plans.json"
    file.write_text('["A+:1:-1,B+:1:2"]')
    assert read_plan_file(file) == (Plan("A+", 1, -1), Plan("B+", 1, 2))
