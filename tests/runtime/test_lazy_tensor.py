"""A tensor that stands for an output nobody has read yet."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ort_accel.runtime.lazy_tensor import LazyTensor, compute_all


class Computed:
    """A computation that counts how often it was asked."""

    def __init__(self) -> None:
        self.leaf = torch.arange(6.0).reshape(2, 3).requires_grad_()
        self.times = 0

    def __call__(self) -> Tensor:
        self.times += 1
        return self.leaf * 2


@pytest.fixture
def computed() -> Computed:
    return Computed()


@pytest.fixture
def unread(computed: Computed) -> LazyTensor:
    return LazyTensor((2, 3), torch.float32, torch.device("cpu"), computed, requires_grad=True)


@pytest.mark.parametrize(
    "question",
    [
        lambda x: x.shape == (2, 3),
        lambda x: x.dtype is torch.float32,
        lambda x: x.size(1) == 3,
        lambda x: len(x) == 2,
        lambda x: x.numel() == 6,
        lambda x: x.requires_grad,
        lambda x: x.is_floating_point(),
        lambda x: torch.is_floating_point(x),
        lambda x: isinstance(x, torch.Tensor),
        lambda x: not x.detach().requires_grad,
        lambda x: x.grad_fn is None,
        lambda x: x.bfloat16().dtype is torch.bfloat16,
        lambda x: x.half().float().requires_grad,
    ],
)
def test_metadata_of_a_lazy_tensor_computes_nothing(
    unread: LazyTensor, computed: Computed, question: Callable[[Tensor], bool]
) -> None:
    assert question(unread)
    assert computed.times == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: 1 + x,
        lambda x: torch.ones(2, 3) @ x.T,
        lambda x: x[..., 0],
        lambda x: x.argmax(-1),
        lambda x: torch.stack([x, torch.zeros(2, 3)]),
        lambda x: torch.nn.functional.cross_entropy(x, torch.tensor([0, 2])),
        lambda x: x.detach().numpy().sum(),
        lambda x: x.tolist(),
        lambda x: x.double().sum().item(),
        lambda x: repr(x.detach()),
        lambda x: [row.sum().item() for row in x],
        lambda x: x.to(torch.float64),
        lambda x: x.float(),
    ],
)
def test_any_other_operation_gives_the_result_of_the_computed_tensor(
    unread: LazyTensor, computed: Computed, use: Callable[[Tensor], object]
) -> None:
    got, wanted = compute_all(use(unread)), use(computed())
    assert str(got) == str(wanted)
    assert computed.times == 2, "once for each side"


def test_a_lazy_tensor_is_computed_once(unread: LazyTensor, computed: Computed) -> None:
    assert torch.equal(unread + unread, computed.leaf * 4)
    assert unread.sum() == 30
    assert computed.times == 1


def test_a_clone_of_a_lazy_tensor_is_made_at_once(unread: LazyTensor, computed: Computed) -> None:
    """Whoever clones it wants it as it is now."""
    copy_of_it = unread.clone()
    assert type(copy_of_it) is Tensor
    unread.detach().zero_()
    assert torch.equal(copy_of_it, computed.leaf * 2)


def test_a_cast_keeps_its_values_when_its_source_is_written_later(unread: LazyTensor, computed: Computed) -> None:
    cast, look = unread.double(), unread.detach()
    unread.detach().zero_()
    assert torch.equal(cast, (computed.leaf * 2).double())
    assert look.tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("cast", [Tensor.float, Tensor.double, Tensor.clone])
def test_gradients_flow_to_the_inputs_of_a_lazy_tensor(
    unread: LazyTensor, computed: Computed, cast: Callable[[Tensor], Tensor]
) -> None:
    cast(unread).sum().backward()
    assert torch.equal(computed.leaf.grad, torch.full((2, 3), 2.0))


def test_an_in_place_change_is_read_later(unread: LazyTensor) -> None:
    values = unread.detach()
    values[0] = -1
    values.mul_(2)
    assert values.tolist() == [[-2, -2, -2], [12, 16, 20]]


def test_a_lazy_tensor_is_saved_and_copied_as_the_computed_tensor(unread: LazyTensor, computed: Computed) -> None:
    file = io.BytesIO()
    torch.save({"logits": unread.detach()}, file)
    file.seek(0)
    loaded = torch.load(file)["logits"]
    assert type(loaded) is Tensor
    assert torch.equal(loaded, computed.leaf * 2)
    assert torch.equal(copy.deepcopy(unread.detach()), computed.leaf * 2)


def test_torch_compile_accepts_a_lazy_tensor(unread: LazyTensor, computed: Computed) -> None:
    @torch.compile(backend="aot_eager")
    def double(x: Tensor) -> Tensor:
        return x.sin() * 2

    assert torch.equal(double(unread), (computed.leaf * 2).sin() * 2)


def test_a_computed_tensor_releases_its_inputs(unread: LazyTensor) -> None:
    unread.read()
    assert unread._compute is None


def test_an_error_of_the_computation_reaches_the_reader() -> None:
    def fail() -> Tensor:
        raise RuntimeError("the weights have changed")

    lost = LazyTensor((2, 3), torch.float32, torch.device("cpu"), fail)
    with pytest.raises(RuntimeError, match="the weights have changed"):
        lost.sum()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * 2


@pytest.mark.parametrize(
    "use",
    [
        Doubled.apply,
        lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=True),
        lambda x: Doubled.apply(x.double()),
    ],
)
def test_a_function_of_a_lazy_tensor_has_its_gradient(
    unread: LazyTensor, computed: Computed, use: Callable[[Tensor], Tensor]
) -> None:
    result = use(unread)
    assert result.requires_grad
    result.sum().backward()
    expected = computed.leaf.detach().clone().requires_grad_()
    use(expected * 2).sum().backward()
    assert torch.equal(computed.leaf.grad, expected.grad)
