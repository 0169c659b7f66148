"""What autograd offers beyond one backward: hooks, several calls, parts of outputs, second derivatives, recompute."""

import copy
import gc

import psutil
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import ort_accel
from tests.against_eager import assert_step_as_eager, pair, report
from tests.tiers import mostly_long


class Two(nn.Module):
    """Two outputs that share their beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x):
        hidden = torch.tanh(self.stem(x))
        return self.left(hidden), self.right(hidden)


class Views(Two):
    """Outputs that look at one another's memory, and one that nothing is differentiated by."""

    def forward(self, x):
        left, right = super().forward(x)
        return left.t(), left, right.view(-1), right.argmax(-1), right.detach()


def assert_gradients_as_eager(ours, eager):
    for (name, got), expected in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(
            got.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("model", "taken"),
    [(Two, [0]), (Two, [1]), (Two, [0, 1]), (Views, [0]), (Views, [1]), (Views, [2]), (Views, [0, 2])],
)
def test_a_backward_through_some_of_the_outputs(model, taken):
    eager, ours = pair(model())
    x = torch.randn(4, 6)
    for each in (eager, ours):
        outputs = each(x)
        sum(outputs[index].square().sum() for index in taken).backward()
    assert_gradients_as_eager(ours, eager)


def test_which_outputs_are_used_may_differ_from_call_to_call():
    eager, ours = pair(Two())
    x = torch.randn(4, 6)
    for model in (eager, ours):
        (first, _), (_, second), (third, fourth) = model(x), model(x.sin()), model(x.cos())
        second.sum().backward()
        assert model.left.weight.grad is None
        assert model.right.weight.grad is not None
        (first.sum() + third.sum() * 0.5).backward()
        fourth.sum()  # computed and not used
    assert_gradients_as_eager(ours, eager)


def test_weight_decay_leaves_alone_what_only_an_unused_output_depends_on():
    eager, ours = pair(Two())
    x = torch.randn(4, 6)
    for model in (eager, ours):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        model(x)[0].square().sum().backward()
        optimizer.step()
        assert model.right.weight not in optimizer.state
    torch.testing.assert_close(ours.state_dict(), eager.state_dict())


def test_a_gradient_of_what_an_unused_output_depends_on_is_eagers_error():
    for model in pair(Two()):
        left, _ = model(torch.randn(4, 6))
        wanted = (model.left.weight, model.right.weight)
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(left.sum(), wanted, retain_graph=True)
        first, second = torch.autograd.grad(left.sum(), wanted, allow_unused=True)
        assert first is not None
        assert second is None


def test_hooks_of_an_unused_output_are_not_called_without_a_gradient():
    _, ours = pair(Two())
    seen = []
    ours.right.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    ours.right.bias.register_post_accumulate_grad_hook(lambda bias: seen.append(bias.grad.clone()))
    ours(torch.randn(4, 6))[0].sum().backward()
    assert not torch.cat([item.flatten() for item in seen]).any()


@pytest.mark.parametrize("sizes_open", [False, True])
def test_the_graph_can_be_kept_for_a_second_backward(sizes_open):
    eager, ours = pair(Two(), {"engine": {"dynamic_shapes": sizes_open}})
    x = torch.randn(4, 6)
    for model in (eager, ours):
        left, right = model(x)
        left.sum().backward(retain_graph=True)
        right.sum().backward()
    assert_gradients_as_eager(ours, eager)


def test_a_second_backward_without_the_graph_is_eagers_error():
    ours = ort_accel.accelerate(Two())
    loss = ours(torch.randn(4, 6))[0].sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_second_derivative_is_eagers():
    eager = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
    ours = ort_accel.accelerate(copy.deepcopy(eager))
    x = torch.randn(3, 6, requires_grad=True)
    for model in (eager, ours):
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
    for one, other in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_gradients_of_inputs():
    eager, ours = pair(Two())
    given = torch.randn(4, 6)
    slopes = []
    for model in (eager, ours):
        x = given.clone().requires_grad_()
        slopes.append(torch.autograd.grad(model(x)[0].square().sum(), x)[0])
    torch.testing.assert_close(slopes[1], slopes[0])


def test_siamese_use_of_one_model():
    eager, ours = pair(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3)))
    one, other = torch.randn(4, 6), torch.randn(5, 6)
    for model in (eager, ours):
        torch.manual_seed(2)
        distance = nn.functional.cosine_similarity(model(one), model(other[:4]))
        (distance.sum() + model(other).mean()).backward()
    assert_gradients_as_eager(ours, eager)


def test_a_generator_learns_through_a_discriminator():
    torch.manual_seed(0)
    games = [(nn.Linear(2, 6), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)))]
    games.append(tuple(ort_accel.accelerate(copy.deepcopy(model)) for model in games[0]))
    for generator, discriminator in games:
        torch.manual_seed(1)
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (generator, discriminator)]
        for _ in range(3):
            real, noise = torch.randn(4, 6), torch.randn(4, 2)
            fake = generator(noise)
            (discriminator(fake.detach()).exp().mean() - discriminator(real).mean()).backward()
            optimizers[1].step()
            generator.zero_grad()
            discriminator.zero_grad()
            (-discriminator(fake).mean()).backward()
            optimizers[0].step()
    for eager, ours in zip(*games, strict=True):
        torch.testing.assert_close(dict(ours.state_dict()), dict(eager.state_dict()), rtol=1e-4, atol=1e-5)


def test_full_backward_hooks_see_and_change_gradients():
    eager, ours = pair(Two())
    seen = {eager: [], ours: []}
    x = torch.randn(4, 6)
    for model, calls in seen.items():
        model.left.register_full_backward_hook(lambda _m, _i, out, calls=calls: calls.append(out[0].sum()))
        model.stem.register_full_backward_pre_hook(lambda _m, out: (out[0] * 2,))
        model.register_full_backward_hook(lambda _m, _i, out, calls=calls: calls.append(out[0].norm()))
        model.register_forward_pre_hook(lambda _m, args: (args[0] * 3,))
        sum(output.square().sum() for output in model(x)).backward()
    assert len(seen[eager]) == 2
    torch.testing.assert_close(sorted(seen[ours]), sorted(seen[eager]), rtol=1e-4, atol=1e-5)
    assert_gradients_as_eager(ours, eager)


def test_outputs_that_nobody_takes_back_free_their_memory():
    ours = ort_accel.accelerate(nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh()))
    x = torch.randn(256, 64)
    process = psutil.Process()

    def resident() -> int:
        for _ in range(40):
            ours(x).sum()
        gc.collect()
        return process.memory_info().rss

    before = resident()
    assert resident() - before < 8 * 2**20  # each call holds 1.5 MiB for its backward


def tiny_llama():
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0.2,
    )
    return LlamaForCausalLM(config).train()


@pytest.mark.parametrize("reentrant", mostly_long([False, True], False))
def test_gradient_checkpointing_of_transformers_repeats_its_dropout(reentrant):
    eager, ours = pair(tiny_llama(), {"engine": {"dynamic_shapes": True}})
    for model in (eager, ours):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for rows, length in ((2, 8), (3, 5)):
        ids = torch.randint(0, 40, (rows, length))
        assert_step_as_eager(eager, ours, input_ids=ids, labels=ids, use_cache=False)


def test_a_model_that_checkpoints_is_refused_where_that_is_not_allowed():
    model = tiny_llama()
    model.gradient_checkpointing_enable()
    ort_accel.accelerate(model, {"engine": {"allow_checkpoint": False}})
    ids = torch.randint(0, 40, (2, 8))
    with pytest.raises(ort_accel.OrtAccelError, match=r"allow_checkpoint is false.*torch\.utils\.checkpoint, in .*py"):
        model(input_ids=ids, labels=ids, use_cache=False)
    model.gradient_checkpointing_disable()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


class Doubled(torch.autograd.Function):
    """Its gradient is twice the true one."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x):
        return Doubled.apply(self.linear(x))


def test_a_custom_function_is_refused_where_that_is_not_allowed():
    ours = ort_accel.accelerate(Custom(), {"engine": {"custom_autograd": False}})
    with pytest.raises(ort_accel.OrtAccelError, match=r"custom_autograd is false.*Function, in .*test_autograd\.py"):
        ours(torch.randn(3, 6))


def test_a_custom_function_inside_a_checkpoint_keeps_its_backward():
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.custom = Custom()

        def forward(self, x):
            return checkpoint(self.custom, x, use_reentrant=False)

    eager, ours = pair(Inside())
    assert_step_as_eager(eager, ours, torch.randn(3, 6))
    assert not [item for item in report(ours).fallbacks if item.op == "a graph break"]
