"""The background process finds out which kernels give PyTorch's results, and how long both take."""

from __future__ import annotations

import ctypes
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from ort_accel.generated import inductor, worker
from ort_accel.generated.builds import why_no_code
from ort_accel.generated.clusters import Cluster
from ort_accel.generated.description import Description
from ort_accel.generated.inductor import Source
from ort_accel.generated.worker import REQUEST, RESULT, SOURCE, Outcome, Request
from tests.generated.cases import whole
from tests.generated.traced import Traced, normal


def cluster_of(function: Callable[..., Any], *args: Tensor, mode: str = "symbolic") -> Cluster:
    (found,) = Traced(function, args, mode).all_clusters()
    return found


X, Y = normal(34, 21), normal(21, 34)
CHAIN = cluster_of(lambda x, y: (x.t() * y).sin() * 2, X, Y)
CALLS_AN_OPERATOR = cluster_of(lambda x, y: torch.gcd(x * 2, y) * 3, whole(8, 8), whole(8, 8))
DIVISION = cluster_of(lambda x, y: torch.div(x + 1, y * 0, rounding_mode="floor"), whole(9, 9), whole(9, 9))


HARMED: dict[str, Callable[[str], str]] = {
    "another_function": lambda text: text.replace("sin()", "cos()").replace("std::sin", "std::cos"),
    "less_exact": lambda text: text.replace("2.0", "2.001"),
    "not_a_number": lambda text: text.replace("2.0", "NAN"),
    "infinite": lambda text: text.replace("2.0", "INFINITY"),
    "of_one_size": lambda text: text.replace("  call(", f"  if (s0 != {CHAIN.hints['s0']}) return 0;\n  call("),
    "without_results": lambda text: text.replace("  call(", "  if (false) call("),
    "with_an_error": lambda text: text.replace("return 0;", "return 1;"),
}
"""What goes wrong in kernels of one cluster."""

WORDS = {
    "another_function": "result 0 is off by",
    "less_exact": "result 0 is off by",
    "not_a_number": "result 0 has other infinities or NaN",
    "infinite": "result 0 has other infinities or NaN",
    "of_one_size": "result 0 has other infinities or NaN",
    "without_results": "result 0 has other infinities or NaN",
    "with_an_error": "the kernel raised an error",
}

EXPANDED = cluster_of(lambda x, y: (x * y).sin() * 2, normal(1, 9).expand(34, 9), normal(34, 9), mode="fake")
REQUESTS = {
    "right": CHAIN,
    "expanded": EXPANDED,
    "calls_an_operator": CALLS_AN_OPERATOR,
    "unknown_operator": Cluster([], [], [], CHAIN.source.replace("aten.sin", "aten.no_such_operator"), CHAIN.symbols),
    "divides_by_zero": DIVISION,
    **dict.fromkeys(HARMED, CHAIN),
    "right_too": CHAIN,
}


def run(folder: Path, requests: dict[str, Cluster]) -> dict[str, Outcome]:
    """Runs the background process's work in this process."""
    wishes = [asdict(Request(name, each.source, each.hints)) for name, each in requests.items()]
    (folder / REQUEST).write_text(json.dumps({"threads": torch.get_num_threads(), "modules": [], "parts": wishes}))
    worker.compile_request(folder)
    return {name: Outcome(**item) for name, item in json.loads((folder / RESULT).read_text()).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("request")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Iterator[dict[str, Outcome]]:
    """The outcomes of one request with clusters of all kinds."""
    if why_no_code():
        pytest.skip(why_no_code())
    write_source = inductor.write_source

    def harmed(name: str, *args: Any) -> Source:
        source = write_source(name, *args)
        text = HARMED.get(name, str)(source.text)
        assert (text != source.text) is (name in HARMED)
        return Source(text, source.conditions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor, "write_source", harmed)
        yield run(folder, REQUESTS)


@pytest.mark.parametrize("name", ["right", "expanded", "right_too"])
def test_a_right_kernel_is_timed_beside_the_operators(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[name]
    assert not outcome.error
    assert 0 < outcome.eager_seconds < math.inf
    assert 0 < outcome.generated_seconds < math.inf


def test_a_cluster_that_is_not_only_kernels_has_an_error(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["calls_an_operator"].error.startswith("CannotGenerate: Inductor calls more than kernels")
    assert "no_such_operator" in outcomes["unknown_operator"].error


@pytest.mark.parametrize("name", HARMED)
def test_a_wrong_kernel_is_found(name: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[name].error.startswith(WORDS[name])
    assert not outcomes[name].is_faster


def test_an_error_of_the_operators_is_no_error_of_the_process(outcomes: dict[str, Outcome]) -> None:
    """The random numbers of the comparison need not suit an operator."""
    assert outcomes["divides_by_zero"].error


def test_errors_have_no_times(outcomes: dict[str, Outcome]) -> None:
    assert all(math.isinf(each.eager_seconds) == bool(each.error) for each in outcomes.values())


def test_every_request_has_an_outcome(outcomes: dict[str, Outcome], folder: Path) -> None:
    assert list(outcomes) == list(REQUESTS)
    assert (folder / SOURCE).with_suffix(".so").exists()


def test_nothing_is_compiled_if_nothing_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "compile_library", lambda _: pytest.fail("it was compiled"))
    outcomes = run(tmp_path, {"one": CALLS_AN_OPERATOR})
    assert outcomes["one"].error
    assert not (tmp_path / SOURCE).with_suffix(".so").exists()


@pytest.mark.parametrize(
    ("texts", "accepted"),
    [
        ({"one": "1", "two": "2"}, "12"),
        ({"one": "1", "broken": "BROKEN", "two": "2"}, "12"),
        ({"broken": "BROKEN"}, None),
        ({"broken": "BROKEN", "too": "BROKEN"}, None),
        ({}, None),
    ],
)
def test_what_the_compiler_refuses_keeps_nothing_from_the_rest(
    texts: dict[str, str], accepted: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_library(source: Path) -> Path:
        if "BROKEN" in source.read_text():
            raise RuntimeError("C++ compile error\nwith a second line")
        return source

    monkeypatch.setattr(inductor, "compile_library", compile_library)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: Path(path).read_text().removeprefix(inductor.PREAMBLE))
    outcomes = {name: Outcome() for name in texts}
    assert worker._library(tmp_path, texts, outcomes) == accepted
    for name, text in texts.items():
        assert outcomes[name].error == ("RuntimeError: C++ compile error" if text == "BROKEN" else "")


def test_a_cluster_of_more_memory_than_allowed_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MAX_BYTES", 100)
    described = Description(CHAIN.source, "large")
    with pytest.raises(MemoryError, match="too large"):
        worker._difference(lambda _: pytest.fail("it ran"), described, CHAIN.hints)


@pytest.mark.parametrize(
    ("outcome", "faster"),
    [
        (Outcome(eager_seconds=2.0, generated_seconds=1.0), True),
        (Outcome(eager_seconds=1.0, generated_seconds=2.0), False),
        (Outcome(eager_seconds=1.0, generated_seconds=1.0), False),
        (Outcome("it is wrong", eager_seconds=2.0, generated_seconds=1.0), False),
        (Outcome(), False),
    ],
)
def test_which_kernels_are_used(outcome: Outcome, faster: bool) -> None:
    assert outcome.is_faster is faster


def test_each_open_size_is_tried_with_another_value() -> None:
    assert worker._other_sizes({"s0": 4, "s1": 7}) == [{"s0": 5, "s1": 7}, {"s0": 4, "s1": 8}]
    assert worker._other_sizes({}) == []


INFINITY, NOT = math.inf, math.nan


@pytest.mark.parametrize(
    ("found", "wanted", "dtype", "same"),
    [
        ([1.0, 2.0], [1.0, 2.0], torch.float32, True),
        ([1.0, 100.001], [1.0, 100.0], torch.float32, True),
        ([1.003, 100.0], [1.0, 100.0], torch.float32, False),
        ([1.01, 1.0], [1.0, 1.0], torch.bfloat16, True),
        ([1.1, 1.0], [1.0, 1.0], torch.bfloat16, False),
        ([1.0, INFINITY], [1.0, INFINITY], torch.float32, True),
        ([1.0, INFINITY], [1.0, -INFINITY], torch.float32, False),
        ([1.0, INFINITY], [1.0, 2.0], torch.float32, False),
        ([1.0, NOT], [1.0, NOT], torch.float32, True),
        ([1.0, 0.0], [1.0, NOT], torch.float32, False),
        ([1.0, NOT], [1.0, 2.0], torch.float32, False),
        ([1.0, NOT], [1.0, INFINITY], torch.float32, False),
        ([], [], torch.float32, True),
        ([3, 4], [3, 4], torch.int64, True),
        ([3, 5], [3, 4], torch.int64, False),
        ([True, False], [True, True], torch.bool, False),
    ],
)
def test_what_counts_as_the_same(found: list[Any], wanted: list[Any], dtype: torch.dtype, same: bool) -> None:
    said = worker._distance(torch.tensor(found, dtype=dtype), torch.tensor(wanted, dtype=dtype))
    assert (said == "") is same, said


def test_random_tensors_are_of_the_types_and_orders_of_memory_that_are_asked_for() -> None:
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]
    found = worker._tensors([inductor.Layout(kind, (40, 30), (1, 40)) for kind in kinds])
    assert [each.dtype for each in found] == kinds
    assert all(each.stride() == (1, 40) for each in found)
    assert all(each.unique().numel() > 1 for each in found)
    assert all(int(each.min()) >= 0 for each in found[2:]), "indices and divisors"
    assert (found[0] < 0).any()


ENDLESS = """
import os
import sys
import time
from pathlib import Path
from ort_accel.generated import worker
worker.compile_request = lambda folder: print(os.getpid(), flush=True) or time.sleep(600)
worker.main(Path(sys.argv[1]), os.getppid())
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


def test_it_ends_and_leaves_no_folder_when_the_training_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "request"
    folder.mkdir()
    (folder / "kernels.cpp").write_text("half of a file")
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, ENDLESS, str(folder)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        assert folder.exists()
        parent.kill()
        process.wait(60)
    assert not folder.exists()


GIVES_WAY = """
import os
import subprocess
import sys
from ort_accel.generated import worker
worker.give_way()
print(os.nice(0), worker.OOM_SCORE.read_text() if worker.OOM_SCORE.exists() else 1000)
"""


def test_training_goes_first() -> None:
    before = os.nice(0)
    said = subprocess.run([sys.executable, "-c", GIVES_WAY], capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(min(19, before + worker.NICENESS)), "1000"]
