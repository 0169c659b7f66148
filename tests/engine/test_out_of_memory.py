"""A step for which there is no memory: an error that says what helps, and the next one trains on."""

from unittest.mock import patch

import pytest
import torch
from accelerate.utils import find_executable_batch_size
from torch import nn

import ort_accel
from ort_accel.runtime.session import Session
from tests.forked import asked
from tests.memory_limit import memory_limit

ENGINE = {"compile_evaluation": True, "compare_with_eager": False}
LACK = "std::bad_alloc"
"""What ONNX Runtime says where the C library has no memory for it."""
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
    """ONNX Runtime gets no memory, and PyTorch does."""
    step(model, 50_000)
    with torch.no_grad(), patch.object(Session, "__call__", side_effect=RuntimeError(LACK)):
        return model(torch.ones(70_000, 64)).norm().item()


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


def main(results):
    torch.set_num_threads(1)
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
    results.put(seen)


@pytest.fixture(scope="module")
def seen():
    return asked(main)


def test_the_error_is_pytorchs_and_says_what_helps(seen):
    said = seen["too large"]
    assert "you tried to allocate 102400000 bytes" in said["error"]
    assert LACK in said["first"]
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
    assert LACK in seen["fallbacks"][0]


def test_a_batch_size_is_found_by_such_errors(seen):
    assert len(seen["tried"]) > 1
    assert seen["tried"][-1] < seen["tried"][0]
