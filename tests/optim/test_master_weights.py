"""FP16_Optimizer around a PyTorch optimizer: fp32 copies, a loss scale, skipped steps, exact resumption."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ort_accel.errors import OptimizerError, OrtAccelError
from ort_accel.optim import FP16_Optimizer, FusedAdam, LossScale

BUILDERS = {
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2, weight_decay=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-1, momentum=0.9),
}


def small_model(dtype=torch.float16, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)
    model[2].float()  # 16-bit and fp32 parameters side by side
    return model


def loss_of(model, batch):
    hidden = model[1](model[0](batch.to(model[0].weight.dtype)))
    return model[3](model[2](hidden.float()).to(model[3].weight.dtype)).float().square().mean()


def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 6, generator=generator) for _ in range(count)]


def everything(model, optimizer):
    state = optimizer.state_dict()
    moments = [tensor.clone() for each in state["optimizer"]["state"].values() for tensor in each.values()
               if isinstance(tensor, torch.Tensor)]  # fmt: skip
    masters = [tensor.clone() for tensor in state["masters"].values()]
    return [*(param.detach().clone() for param in model.parameters()), *moments, *masters]


def equal(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def run(model, optimizer, data, overflows=()):
    for number, batch in enumerate(data):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, batch))
        if number in overflows:
            model[0].weight.grad[0, 0] = torch.inf
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()


@pytest.mark.parametrize("inner", BUILDERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_update_is_that_of_fp32_weights(inner, dtype):
    """The optimizer inside sees fp32 weights and unscaled fp32 gradients; parameters are their rounded values."""
    model = small_model(dtype)
    shadow = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    plain = BUILDERS[inner](shadow)
    optimizer = FP16_Optimizer(BUILDERS[inner](model.parameters()), loss_scale=LossScale(1024.0))
    for batch in batches(10):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, batch))
        for param, its_shadow in zip(model.parameters(), shadow, strict=True):
            its_shadow.grad = param.grad.float() / 1024.0
        plain.step()
        optimizer.step()
    for param, its_shadow in zip(model.parameters(), shadow, strict=True):
        assert torch.equal(param, its_shadow.detach().to(param.dtype))


def test_updates_smaller_than_a_16_bit_step_add_up():
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = FP16_Optimizer(torch.optim.SGD([weight], lr=1e-3), loss_scale=LossScale(1.0))
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    torch.testing.assert_close(weight.detach().float(), torch.full((4,), 0.9), rtol=0, atol=4e-3)


@settings(max_examples=25, deadline=None)
@given(
    history=st.lists(st.booleans(), min_size=1, max_size=12),
    where=st.integers(0, 3),
    kind=st.sampled_from(["inf", "nan"]),
)
def test_overflows_at_random_steps_touch_nothing_and_drive_the_scale(history, where, kind):
    model = small_model()
    rules = LossScale(512.0, window=3, hysteresis=2)
    optimizer = FP16_Optimizer(BUILDERS["FusedAdam"](model.parameters()), loss_scale=copy.copy(rules))
    for batch, overflow in zip(batches(len(history)), history, strict=True):
        before = everything(model, optimizer)
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, batch))
        if overflow:
            list(model.parameters())[where].grad.view(-1)[0] = float(kind)
        optimizer.step()
        rules.update(overflow)
        assert optimizer.overflow == overflow
        assert equal(before, everything(model, optimizer)) == overflow
        assert optimizer.loss_scale == rules
    assert optimizer.skipped_steps == sum(history)


@pytest.mark.parametrize("inner", BUILDERS)
@pytest.mark.parametrize("way", ["state_dict", "file", "pickle"])
def test_a_run_resumed_in_the_middle_equals_the_uninterrupted_one(inner, way, tmp_path):
    data, overflows = batches(16), {2, 7, 8, 12}
    scale = LossScale(2048.0, window=3, hysteresis=2)
    model = small_model()
    optimizer = FP16_Optimizer(BUILDERS[inner](model.parameters()), loss_scale=copy.copy(scale))
    run(model, optimizer, data, overflows)

    first = small_model()
    stopped = FP16_Optimizer(BUILDERS[inner](first.parameters()), loss_scale=copy.copy(scale))
    run(first, stopped, data[:8], overflows)
    if way == "pickle":
        second, resumed = pickle.loads(pickle.dumps((first, stopped)))
    else:
        weights, state = copy.deepcopy((first.state_dict(), stopped.state_dict()))
        if way == "file":
            torch.save(state, tmp_path / "optimizer.pt")
            state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
        second = small_model(seed=5)
        second.load_state_dict(weights)
        resumed = FP16_Optimizer(BUILDERS[inner](second.parameters()), loss_scale=copy.copy(scale))
        resumed.load_state_dict(state)
    run(second, resumed, data[8:], {number - 8 for number in overflows})
    assert equal(everything(second, resumed), everything(model, optimizer))
    assert (resumed.loss_scale, resumed.skipped_steps) == (optimizer.loss_scale, optimizer.skipped_steps)


def test_clipping_measures_unscaled_gradients_and_clips_them():
    model = small_model()
    optimizer = FP16_Optimizer(BUILDERS["SGD"](model.parameters()), loss_scale=LossScale(256.0))
    optimizer.backward(100 * loss_of(model, batches(1)[0]))
    wanted = torch.linalg.vector_norm(torch.cat([p.grad.float().reshape(-1) / 256 for p in model.parameters()]))
    norm = optimizer.clip_grad_norm_(0.5)
    torch.testing.assert_close(norm, wanted)
    assert norm > 0.5
    clipped = [p.grad.reshape(-1) for group in optimizer.param_groups for p in group["params"]]
    assert torch.linalg.vector_norm(torch.cat(clipped)).item() == pytest.approx(0.5, rel=1e-4)


def test_clipping_an_overflow_says_infinite_and_the_step_is_skipped():
    model = small_model()
    optimizer = FP16_Optimizer(BUILDERS["SGD"](model.parameters()))
    before = everything(model, optimizer)
    optimizer.backward(loss_of(model, batches(1)[0]) * torch.inf)
    assert optimizer.clip_grad_norm_(1.0) == torch.inf
    optimizer.step()
    assert equal(before, everything(model, optimizer))
    assert optimizer.skipped_steps == 1


def test_accumulated_gradients_are_those_of_the_summed_loss():
    model, twin = small_model(), small_model()
    pair = [FP16_Optimizer(BUILDERS["SGD"](m.parameters()), loss_scale=LossScale(64.0)) for m in (model, twin)]
    data = batches(4)
    for batch in data:
        pair[0].backward(loss_of(model, batch) / 4)
    pair[1].backward(sum(loss_of(twin, batch) / 4 for batch in data))
    for optimizer in pair:
        optimizer.step()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-3, atol=2e-3)


def test_schedulers_and_closures_and_new_groups_work():
    model = small_model()
    layers = list(model.children())
    optimizer = FP16_Optimizer(torch.optim.SGD(layers[0].parameters(), lr=1.0), loss_scale=LossScale(64.0))
    optimizer.add_param_group({"params": [*layers[2].parameters(), *layers[3].parameters()], "lr": 0.5})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    before = everything(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batches(1)[0])
        optimizer.backward(loss)
        return loss

    assert optimizer.step(closure) > 0
    schedule.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, everything(model, optimizer), strict=True))
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert all(p.dtype == torch.float32 for group in optimizer.param_groups for p in group["params"])


def test_an_optimizer_that_has_a_state_keeps_it():
    model = small_model(torch.bfloat16)
    inner = BUILDERS["AdamW"](model.parameters())
    loss_of(model, batches(1)[0]).backward()
    inner.step()
    moments = [state["exp_avg"].float() for state in inner.state.values()]
    optimizer = FP16_Optimizer(inner)
    kept = [optimizer.state[p]["exp_avg"] for group in optimizer.param_groups for p in group["params"]]
    assert len(kept) == len(moments)
    assert all(any(torch.equal(a, b) for b in moments) and a.dtype == torch.float32 for a in kept)


def test_impossible_optimizers_are_refused_with_advice():
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(OrtAccelError, match=r"sparse gradient.*sparse=False"):
        FP16_Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.1)).step()
    optimizer = FP16_Optimizer(BUILDERS["AdamW"](small_model().parameters()))
    with pytest.raises(OptimizerError, match="it has no 'masters'"):
        optimizer.load_state_dict(optimizer.optimizer.state_dict())
    other = FP16_Optimizer(BUILDERS["AdamW"](small_model().half().parameters()))
    with pytest.raises(OptimizerError, match="fp32 copies of 4 parameters and this optimizer of 6"):
        other.load_state_dict(optimizer.state_dict())
    with pytest.raises(OptimizerError, match=r"FP16_Optimizer takes a torch.optim.Optimizer.*not a Sequential"):
        FP16_Optimizer(small_model())


def test_a_copy_of_an_optimizer_with_a_scheduler_steps_its_own_model():
    first = small_model()
    optimizer = FP16_Optimizer(BUILDERS["AdamW"](first.parameters()), loss_scale=LossScale(64.0))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for second, copied in (copy.deepcopy((first, optimizer)), pickle.loads(pickle.dumps((first, optimizer)))):
        before = [p.clone() for p in first.parameters()], [p.clone() for p in second.parameters()]
        copied.backward(loss_of(second, batches(1)[0]))
        copied.step()
        assert all(torch.equal(a, b) for a, b in zip(before[0], first.parameters(), strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(before[1], second.parameters(), strict=True))


def test_an_optimizer_that_evaluates_the_model_several_times_in_a_step_is_refused():
    with pytest.raises(OptimizerError, match="LBFGS evaluates the model several times"):
        FP16_Optimizer(torch.optim.LBFGS(small_model().parameters()))
