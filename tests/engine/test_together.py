"""Processes that train together: what one does otherwise hurts no result, and nobody waits for one that is gone."""

import signal

import pytest
import torch

from tests.engine.together import end_badly
from tests.forked import START
from tests.ranks import runs_in_ranks
from tests.tiers import mostly_long

LONG = ["checkpointing by layers"]
SHARDED = mostly_long([*LONG, "net by layers", "net by parts of layers"], "net by layers", "net by parts of layers")
UNEVEN = ["other shapes", "a shorter dataset", "another operator in PyTorch", "a failure in ONNX Runtime"]
ROUNDING = {"rel": 1e-5, "abs": 1e-5}


@pytest.fixture(scope="module")
def see(tmp_path_factory):
    others = ["net by layers", "net by parts of layers", *UNEVEN]
    return runs_in_ranks("tests.engine.together", tmp_path_factory, LONG, others)


@pytest.mark.parametrize("name", [*SHARDED, *UNEVEN])
def test_losses_and_weights_equal_those_without_the_engine(see, name):
    runs = see(name)
    for run in runs:
        assert run["mine"] == pytest.approx(run["stock"], **ROUNDING)
        assert run["stock"][0] != run["stock"][2], "nothing was learned"
        assert run["furthest"] < 1e-5
        assert any(segment["runner"] == "onnxruntime" for segment in run["report"]["segments"])
    assert runs[0]["stock"] != runs[1]["stock"]


@pytest.mark.parametrize(
    ("name", "layers", "graphs"),
    [
        # each kind forward and backward, for fixed and for open sizes; in evaluation, forward alone
        pytest.param(
            "checkpointing by layers",
            "4 layers (FSDPLlamaDecoderLayer, Linear)",
            2 * 4 + 4,  # a cache tells layers apart
            marks=pytest.mark.long,
        ),
        ("net by layers", "4 layers (FSDPLayer, Linear)", 3 * 4 + 3),  # there are two kinds of Layer
        ("net by parts of layers", "7 layers (FSDPLinear, Linear)", 3 * 4 + 3),
    ],
)
def test_layers_that_are_alike_share_their_graphs(see, name, layers, graphs):
    for run in see(name):
        assert f"FSDP2 shards this model, and {layers} run on ONNX Runtime one by one" in run["report"]["notes"]
        compilations = run["report"]["counters"]["compilations"]
        # Before torch 2.13 a kind of layer whose class another kind has made open begins with open sizes.
        assert compilations == graphs or (torch.__version__ < (2, 13) and compilations < graphs)
        assert "a graph break" not in {item["op"] for item in run["report"]["fallbacks"]}


@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_model_can_be_restored(see, name):
    for run in see(name):
        assert run["restored"] == pytest.approx(run["stock"][-1:], **ROUNDING)


def test_each_process_reports_what_happened_to_it_alone(see):
    def refusals(rank, name):
        return {item["reason"] for item in see(name)[rank]["report"]["fallbacks"]}

    assert "asked for in the configuration" not in refusals(0, "another operator in PyTorch")
    assert "asked for in the configuration" in refusals(1, "another operator in PyTorch")
    assert "failed in ONNX Runtime" not in refusals(0, "a failure in ONNX Runtime")
    assert "failed in ONNX Runtime" in refusals(1, "a failure in ONNX Runtime")


@pytest.mark.parametrize(
    ("how", "code"),
    mostly_long(
        [
            ("kill -9", -signal.SIGKILL),
            ("an error", 1),
            ("a shorter dataset", 0),
            ("no memory in the engine", 1),
            ("no memory in PyTorch", 1),
        ],
        ("kill -9", -signal.SIGKILL),
        ("a shorter dataset", 0),
        ("no memory in the engine", 1),
    ),
    ids=str,
)
def test_nobody_waits_for_a_process_that_is_gone(tmp_path, how, code):
    processes = [START.Process(target=end_badly, args=(rank, how, str(tmp_path))) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [1, code]
    assert "onnection" in (tmp_path / "0.txt").read_text()
    if how.startswith("no memory"):
        said = (tmp_path / "1.txt").read_text()
        assert "you tried to allocate" in said
    if how == "no memory in the engine":
        assert "in _by_onnx_runtime" in said, "ONNX Runtime is tried first"
        assert "ort_accel: rank 1 of 2 processes ran out of memory" in said
        assert "Train with smaller batches" in said
