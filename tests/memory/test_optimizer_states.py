"""The state that an optimizer tells beforehand is that which it has after a step; predictions and budgets count it."""

import gc

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.optimization import Adafactor

import ort_accel
from ort_accel import OrtAccelError
from ort_accel.memory.optimizer_states import _tensors, optimizer_of, state_bytes
from ort_accel.optim import FusedAdam, MasterWeightOptimizer

optim = torch.optim
SHAPES = [(300, 64), (64, 64), (64,), (64,), (10, 8, 4), (4096, 8)]


def parameters_of(dtype=torch.float32):
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def step(optimizer, parameters):
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def held(optimizer):
    tensors = (tensor for state in optimizer.state.values() for tensor in _tensors(state))
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def grouped(parameters):
    decayed, others = parameters[:2], parameters[2:]
    return optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0, "amsgrad": True}])


OPTIMIZERS = {
    "SGD": lambda parameters: optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": optim.AdamW,
    "AdamW, fused": lambda parameters: optim.AdamW(parameters, fused=True),
    "AdamW, foreach": lambda parameters: optim.AdamW(parameters, foreach=True),
    "AdamW, groups that differ": grouped,
    "RMSprop": lambda parameters: optim.RMSprop(parameters, momentum=0.9, centered=True),
    "Adagrad": optim.Adagrad,
    "Adamax": optim.Adamax,
    "NAdam": optim.NAdam,
    "Adafactor of torch": optim.Adafactor,
    "Adafactor": Adafactor,
    "Adafactor with momentum": lambda parameters: Adafactor(parameters, beta1=0.9),
    "Muon": lambda parameters: optim.Muon([one for one in parameters if one.ndim == 2]),
    "FusedAdam": FusedAdam,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_is_told_before_the_first_step(name, dtype):
    parameters = parameters_of(dtype)
    optimizer = OPTIMIZERS[name](parameters)
    before = {id(parameter): dict(state) for parameter, state in optimizer.state.items()}
    told = state_bytes(optimizer, parameters)
    assert {id(parameter): dict(state) for parameter, state in optimizer.state.items()} == before
    step(optimizer, parameters)
    assert told == held(optimizer)
    assert state_bytes(optimizer, parameters) == told


@pytest.mark.parametrize(
    "name",
    ["AdamW8bit", "AdamW32bit", "PagedAdamW8bit", "Lion", "Lion8bit", "AdEMAMix8bit", "RMSprop8bit", "Adagrad8bit"],
)
def test_the_state_of_bitsandbytes_is_told(name):
    """Without the tables of eight-bit numbers, which exist with the optimizer and are shared."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    parameters = parameters_of()
    optimizer = getattr(bitsandbytes.optim, name)(parameters)
    tables = dict(optimizer.name2qmap)
    told = state_bytes(optimizer, parameters)
    assert optimizer.name2qmap.keys() == tables.keys()
    assert all(optimizer.name2qmap[key] is table for key, table in tables.items())
    step(optimizer, parameters)
    shared = {id(table): table.nbytes for table in optimizer.name2qmap.values()}
    used = {id(tensor) for state in optimizer.state.values() for tensor in _tensors(state)}
    assert told == held(optimizer) - sum(size for key, size in shared.items() if key in used)


def test_fp32_copies_of_weights_count():
    parameters = parameters_of(torch.bfloat16)
    optimizer = MasterWeightOptimizer(FusedAdam(parameters))
    elements = sum(parameter.numel() for parameter in parameters)
    assert state_bytes(optimizer, parameters) == 3 * 4 * elements + 4 * len(parameters)


def test_a_step_on_fake_tensors_is_no_step_for_anybody_else():
    parameters, seen = parameters_of(), []
    optimizer = optim.AdamW(parameters)
    hook = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    random = torch.get_rng_state()
    state_bytes(optimizer, parameters)
    hook.remove()
    assert seen == []
    assert torch.equal(random, torch.get_rng_state())


def test_only_the_parameters_that_are_asked_for_count():
    parameters = parameters_of()
    assert state_bytes(optim.AdamW(parameters), parameters[:1]) == 2 * parameters[0].nbytes + 4


def test_an_optimizer_that_does_not_tell_is_none():
    class Closed(optim.Optimizer):
        def step(self):
            raise RuntimeError("needs memory")

    parameters = parameters_of()
    assert state_bytes(Closed(parameters, {}), parameters) is None
    assert state_bytes(object, parameters) is None


def test_the_optimizer_of_a_model_is_found():
    parameters, others = parameters_of(), parameters_of()
    assert optimizer_of(parameters) is None
    optimizer = optim.SGD(parameters, lr=0.1)
    wrapped = MasterWeightOptimizer(optim.AdamW(others[:2]))
    assert optimizer_of(parameters) is optimizer
    assert optimizer_of(others) in (wrapped, wrapped.optimizer)
    assert optimizer_of(parameters_of()) is None
    del optimizer
    gc.collect()


WIDTH = 512
PARAMETER_BYTES = 3 * (WIDTH * WIDTH + WIDTH) * 4


def model_and_batch():
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(64, WIDTH)


def predicted(make, **memory):
    """The bytes of states in a prediction, and the notes of the report."""
    model, batch = model_and_batch()
    ort_accel.accelerate(model, {"memory": memory, "observe": {"memory_stats": True, "log_level": "error"}})
    optimizer = make(list(model.parameters()))
    model(batch).sum().backward()
    report = ort_accel.report(model)
    [found] = report.memory.values()
    if optimizer is not None:
        optimizer.step()
    return found.stages[-1].amounts["optimizer states"], 0 if optimizer is None else held(optimizer), report.notes


@pytest.mark.parametrize("name", ["SGD", "momentum", "AdamW", "Adafactor", "FusedAdam"])
def test_a_prediction_counts_the_optimizer_of_the_loop(name):
    told, actual, notes = predicted(OPTIMIZERS[name])
    assert told == actual
    assert any(note.startswith("optimizer states: ") for note in notes)


def test_adam_is_assumed_and_said_where_there_is_no_optimizer():
    told, _, notes = predicted(lambda parameters: None)
    assert told == 2 * PARAMETER_BYTES
    assert any(
        "two a parameter are assumed, as Adam keeps; no optimizer of this model exists yet" in note for note in notes
    )


def test_a_budget_that_sgd_keeps_is_too_small_for_adam():
    with pytest.raises(OrtAccelError, match="the smallest budget that can be kept is") as refused:
        predicted(OPTIMIZERS["SGD"], budget="1KiB")
    least = str(refused.value).rpartition("kept is ")[2].partition(";")[0]
    assert predicted(OPTIMIZERS["SGD"], budget=least)[:2] == (0, 0)
    with pytest.raises(OrtAccelError, match=f"memory.budget: {least} allows"):
        predicted(OPTIMIZERS["AdamW"], budget=least)
