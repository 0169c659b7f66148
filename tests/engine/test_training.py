"""Whatever a training loop does with a model gives eager's results."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.against_eager import assert_same, assert_step_as_eager, compilations, pair, step
from tests.engine.test_verbs import Net


def assert_close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def test_dropout_draws_eagers_masks_bit_for_bit():
    class Dropped(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x, 0.3) + nn.functional.dropout(x.transpose(0, 1), 0.5).transpose(0, 1)

    eager, ours = pair(Dropped())
    x = torch.randn(33, 70).exp()  # no zeros, so that zeros are the mask
    torch.manual_seed(3)
    expected = eager(x)
    torch.manual_seed(3)
    got = ours(x)
    assert torch.equal(got == 0, expected == 0)
    assert_close(got, expected)


def test_several_calls_before_one_backward():
    eager, ours = pair(Net())
    xs = [torch.randn(3, 8) for _ in range(3)]
    for model in (eager, ours):
        torch.manual_seed(0)
        sum(model(x).square().sum() for x in xs).backward()
    for got, expected in zip(gradients(ours), gradients(eager), strict=True):
        assert_close(got, expected)


def test_gradients_add_up_over_micro_batches():
    eager, ours = pair(Net())
    for model in (eager, ours):
        torch.manual_seed(0)
        for scale in (1, 2, 3):
            model(torch.full((3, 8), 0.1 * scale)).square().sum().backward()
    for got, expected in zip(gradients(ours), gradients(eager), strict=True):
        assert_close(got, expected)


def test_a_frozen_parameter_thaws():
    eager, ours = pair(Net())
    for frozen in (True, False, True):
        for model in (eager, ours):
            model.first.weight.requires_grad_(not frozen)
            model.zero_grad()
        x = torch.randn(3, 8)
        expected, got = step(eager, x), step(ours, x)
        assert (expected.gradients["first.weight"] is None) == frozen
        assert (got.gradients["first.weight"] is None) == frozen
        assert_close(got.gradients["last.weight"], expected.gradients["last.weight"])


def test_tied_weights_share_one_gradient():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids)).log_softmax(-1)

    assert_step_as_eager(*pair(Tied()), torch.randint(0, 11, (3, 5)))


def test_running_statistics_are_those_of_eager():
    eager, ours = pair(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    for _ in range(3):
        assert_step_as_eager(eager, ours, torch.randn(2, 3, 8, 8))
    for got, expected in zip(ours.buffers(), eager.buffers(), strict=True):
        assert_close(got, expected)
    x = torch.randn(2, 3, 8, 8)
    assert_close(ours.eval()(x), eager.eval()(x))


def test_evaluation_and_training_take_turns():
    eager, ours = pair(Net())
    x = torch.randn(3, 8)
    for _ in range(2):
        assert_step_as_eager(eager.train(), ours.train(), x)
        with torch.no_grad():
            assert_close(ours.eval()(x), eager.eval()(x))
        with torch.inference_mode():
            assert_close(ours(x), eager(x))
        assert not ours(x.clone()).isnan().any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_repeats_its_dropout(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.3)) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    eager, ours = pair(Checkpointed())
    x = torch.randn(4, 8, requires_grad=True)
    expected, got = step(eager, x), step(ours, x)
    assert_close(got.loss, expected.loss)
    for name, gradient in expected.gradients.items():
        assert_close(got.gradients[name], gradient)


def test_custom_functions_keep_their_own_backward():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x):
            return Doubled.apply(self.linear(x))

    assert_step_as_eager(*pair(Custom()), torch.randn(3, 8))


def test_hooks_run():
    eager, ours = pair(Net())
    seen = {"eager": [], "ours": []}

    def watch(model, calls):
        model.register_forward_hook(lambda _module, _inputs, out: calls.append(out.shape))
        model.first.weight.register_hook(lambda grad: grad * 3)
        model.last.bias.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad.sum().item()))

    watch(eager, seen["eager"])
    watch(ours, seen["ours"])
    assert_step_as_eager(eager, ours, torch.randn(3, 8))
    assert seen["ours"][0] == seen["eager"][0]
    assert seen["ours"][1] == pytest.approx(seen["eager"][1], abs=1e-5)


def test_inputs_changed_in_place_are_changed():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x):
            x.mul_(2)
            return self.linear(x)

    eager, ours = pair(InPlace())
    one, other = torch.ones(3, 8), torch.ones(3, 8)
    assert_same(step(ours, one), step(eager, other))
    assert torch.equal(one, other)


def test_a_model_in_double_precision():
    eager, ours = pair(Net().double())
    x = torch.randn(3, 8, dtype=torch.float64)
    assert_same(step(ours, x), step(eager, x), rtol=1e-12, atol=1e-12)


def distances_from_exact(model, x, how):
    """How far eager's and our gradients are from those in double precision; `how` runs a model."""
    eager, ours = pair(model)
    exact = copy.deepcopy(model).double()
    exact(x.double()).square().sum().backward()
    for candidate in (eager, ours):
        how(candidate, x).double().square().sum().backward()
    wanted = torch.cat([gradient.flatten() for gradient in gradients(exact)])
    return [
        (torch.cat([gradient.double().flatten() for gradient in gradients(candidate)]) - wanted).norm().item()
        for candidate in (eager, ours)
    ]


def half_precision_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_rounds_no_worse_than_eager(dtype):
    model = half_precision_model().to(dtype)
    theirs, mine = distances_from_exact(model, torch.randn(5, 8, dtype=dtype), lambda candidate, x: candidate(x))
    assert 0 < mine < 1.5 * theirs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_no_worse_than_eager(dtype):
    def under_autocast(candidate, x):
        with torch.autocast("cpu", dtype):
            return candidate(x)

    theirs, mine = distances_from_exact(half_precision_model(), torch.randn(5, 8), under_autocast)
    assert 0 < mine < 1.5 * theirs


def test_outputs_of_every_form():
    class Forms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x, *, scale=1.0):
            y = self.linear(x) * scale
            return {"loss": y.sum(), "none": None, "nested": (y, [y.exp(), 3, "text"])}

    eager, ours = pair(Forms())
    x = torch.randn(3, 8)
    got, expected = ours(x, scale=0.5), eager(x, scale=0.5)
    assert got["none"] is None
    assert got["nested"][1][1:] == [3, "text"]
    assert_close(got["nested"][1][0], expected["nested"][1][0])
    got["nested"][0].sum().backward()
    expected["nested"][0].sum().backward()
    assert_close(ours.linear.weight.grad, eager.linear.weight.grad)


def test_a_parameter_that_is_replaced_is_seen():
    eager, ours = pair(Net())
    x = torch.randn(3, 8)
    assert_step_as_eager(eager, ours, x)
    last = nn.Linear(16, 7)
    eager.last, ours.last = last, copy.deepcopy(last)
    assert_step_as_eager(eager, ours, x)
    for model in (eager, ours):
        model.first.weight.data = model.first.weight.data.clone() * 2
    assert_step_as_eager(eager, ours, x)


def test_an_optimizer_updates_what_the_engine_reads():
    eager, ours = pair(Net().eval())
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in (eager, ours)]
    for _ in range(10):
        assert_step_as_eager(eager, ours, torch.randn(4, 8))
        for optimizer in optimizers:
            optimizer.step()
    assert compilations(ours) == 2


def test_two_equal_runs_give_the_same_bits():
    def losses():
        torch.manual_seed(0)
        _, model = pair(Net(), {"version": 1, "engine": {"deterministic": True}})
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        found = []
        for number in range(5):
            trace = step(model, torch.linspace(-1, 1, 32).view(4, 8), seed=number)
            optimizer.step()
            found.append(trace.loss.item())
        return found

    assert losses() == losses()
