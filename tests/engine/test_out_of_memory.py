"""A step for which there is no memory: an error that says what helps, and the next one trains on."""

import json

import pytest
import torch
from accelerate.utils import find_executable_batch_size
from torch import nn

import ort_accel
from ort_accel.compiler import settings
from tests.forked import START
from tests.memory_limit import memory_limit

ENGINE = {"compile_evaluation": True, "compare_with_eager": False}
QUIET = {"engine": ENGINE, "observe": {"log_level": "error"}}


def a_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))


def step(model, rows):
    model.zero_grad()
    loss = model(torch.ones(rows, 64)).square().mean()
    loss.backward()
    return [loss.item(), *(parameter.grad.norm().item() for parameter in model.parameters())]


def too_large(model):
    """Neither ONNX Runtime nor PyTorch gets the memory."""
    with memory_limit(30), pytest.raises(RuntimeError) as caught:
        step(model, 50_000)
    return {"error": str(caught.value), "first": str(caught.value.__context__), "notes": caught.value.__notes__}


def large(model):
    """ONNX Runtime's pool keeps memory in pieces that are too small. What it does not get, PyTorch gets from there."""
    step(model, 50_000)
    rows = torch.ones(70_000, 64)
    with torch.no_grad(), memory_limit(60):
        return model(rows).norm().item()


def found(model):
    """accelerate, and so a Trainer, looks for a batch size by such errors."""
    tried = []

    @find_executable_batch_size(starting_batch_size=100_000)
    def train(batch_size):
        tried.append(batch_size)
        step(model, batch_size)

    with memory_limit(150):
        train()
    return tried


def main(folder, pool_from):
    torch.set_num_threads(1)
    settings.POOL_LEAST_BYTES = pool_from
    mine, stock = ort_accel.accelerate(a_model(), QUIET), a_model()
    for rows in (4, 6):
        step(mine, rows)
        with torch.no_grad():
            mine(torch.ones(rows, 64))
    compiled = ort_accel.report(mine).counters["compilations"]
    seen = {"too large": too_large(mine), "before": len(ort_accel.report(mine).fallbacks)}
    seen["small"] = [step(mine, 1000), step(stock, 1000)]
    seen["large"] = [large(mine), stock(torch.ones(70_000, 64)).norm().item()]
    seen["fallbacks"] = [item.detail for item in ort_accel.report(mine).fallbacks]
    seen["tried"] = found(mine)
    seen["small again"] = [step(mine, 1000), step(stock, 1000)]
    seen["compiled anew"] = ort_accel.report(mine).counters["compilations"] - compiled
    (folder / "seen.json").write_text(json.dumps(seen))


@pytest.fixture(
    scope="module",
    params=[
        (0, "Failed to allocate memory for requested buffer of size 102400000"),
        (32 << 20, "you tried to allocate 102400000 bytes"),
    ],
    ids=["results in the pool", "results in PyTorch's memory"],
)
def seen(tmp_path_factory, request):
    pool_from, lack = request.param
    folder = tmp_path_factory.mktemp("memory")
    process = START.Process(target=main, args=(folder, pool_from))
    process.start()
    process.join(100)
    assert process.exitcode == 0
    return json.loads((folder / "seen.json").read_text()) | {"lack": lack}


def test_the_error_is_pytorchs_and_says_what_helps(seen):
    said = seen["too large"]
    assert "you tried to allocate 102400000 bytes" in said["error"]
    assert seen["lack"] in said["first"]
    (note,) = said["notes"]
    assert note.startswith("ort_accel: this process ran out of memory. It holds ")
    assert "memory.budget or memory.level" in note
    assert seen["before"] == 0, "nothing is left to PyTorch for that"


@pytest.mark.parametrize("which", ["small", "small again", "large"])
def test_other_steps_train_on_as_in_eager(seen, which):
    mine, stock = seen[which]
    assert mine == pytest.approx(stock, rel=1e-4)
    assert seen["compiled anew"] == 0


def test_what_onnx_runtime_has_no_memory_for_pytorch_computes(seen):
    assert len(seen["fallbacks"]) == 1
    assert "Failed to allocate memory" in seen["fallbacks"][0]


def test_a_batch_size_is_found_by_such_errors(seen):
    assert len(seen["tried"]) > 1
    assert seen["tried"][-1] < seen["tried"][0]
