"""Processes that train together: what one does otherwise hurts no result, and nobody waits for one that is gone."""

import json
import signal

import pytest

from tests.ranks import STOPPED, ends_of_ranks, run_ranks

SHARDED = [
    "llama by layers",
    "checkpointing by layers",
    "net by layers",
    "net by parts of layers",
    "net as one",
]
UNEVEN = ["other shapes", "a shorter dataset", "another operator in PyTorch", "a failure in ONNX Runtime"]
ROUNDING = {"rel": 1e-5, "abs": 1e-5}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What both processes saw."""
    folder = tmp_path_factory.mktemp("together")
    run_ranks("tests.engine.together", "trains", folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", [*SHARDED, *UNEVEN])
def test_losses_and_weights_equal_those_without_the_engine(seen, name):
    for process in seen:
        run = process[name]
        assert run["mine"] == pytest.approx(run["stock"], **ROUNDING)
        assert run["stock"][0] != run["stock"][2], "nothing was learned"
        assert run["furthest"] < 1e-5
        assert any(segment["runner"] == "onnxruntime" for segment in run["report"]["segments"])
    assert seen[0][name]["stock"] != seen[1][name]["stock"]


@pytest.mark.parametrize(
    ("name", "layers", "graphs"),
    [
        # forward and backward, for fixed and for open sizes, and each forward once more in evaluation
        ("llama by layers", "4 layers (FSDPLlamaDecoderLayer, Linear)", 10),
        ("net by layers", "4 layers (FSDPLayer, Linear)", 15),  # of two kinds of Layer
        ("net by parts of layers", "7 layers (FSDPLinear, Linear)", 15),
        ("net as one", "4 layers (Layer, Linear)", 15),
    ],
)
def test_layers_that_are_alike_share_their_graphs(seen, name, layers, graphs):
    for process in seen:
        run = process[name]
        assert f"FSDP2 shards this model, and {layers} run on ONNX Runtime one by one" in run["report"]["notes"]
        assert run["report"]["counters"]["compilations"] == graphs
        assert "a graph break" not in {item["op"] for item in run["report"]["fallbacks"]}


@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_model_can_be_restored(seen, name):
    for process in seen:
        assert process[name]["restored"] == pytest.approx(process[name]["stock"][-1:], **ROUNDING)


def test_each_process_reports_what_happened_to_it_alone(seen):
    def refusals(rank, name):
        return {item["reason"] for item in seen[rank][name]["report"]["fallbacks"]}

    assert "asked for in the configuration" not in refusals(0, "another operator in PyTorch")
    assert "asked for in the configuration" in refusals(1, "another operator in PyTorch")
    assert "failed in ONNX Runtime" not in refusals(0, "a failure in ONNX Runtime")
    assert "failed in ONNX Runtime" in refusals(1, "a failure in ONNX Runtime")


@pytest.mark.parametrize(
    ("how", "code"), [("kill -9", -signal.SIGKILL), ("an error", 1), ("a shorter dataset", 0)], ids=str
)
def test_nobody_waits_for_a_process_that_is_gone(how, code):
    (survivor, said), (gone, _) = ends_of_ranks("tests.engine.together", "ends", how, timeout=100.0)
    assert gone == code
    assert survivor not in (0, STOPPED), said
    assert "Connection" in said or "connection" in said
