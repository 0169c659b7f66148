"""Results of PyTorch's operators in plain blocks: the same bits."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal import common_utils
from torch.testing._internal.opinfo import core
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import ort_accel
from benchmarks.op_parity import operators
from ort_accel.kernels import output_buffers as room
from tests.against_eager import step

aten = torch.ops.aten


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes of what was written into plain blocks. They hold rubbish before, and each result is large enough."""
    sizes: list[tuple[int, ...]] = []

    def take(size: Sequence[int], dtype: torch.dtype) -> Tensor:
        sizes.append(tuple(size))
        return torch.empty(size, dtype=dtype).fill_(torch.nan if dtype.is_floating_point or dtype.is_complex else 77)

    monkeypatch.setattr(room, "empty_in_heap", take)
    monkeypatch.setattr(room, "LEAST_BYTES", 0)
    monkeypatch.setattr(room, "fragments_heap", lambda: True)  # whatever this C library does
    return sizes


def scores(dtype: torch.dtype = torch.float32) -> Tensor:
    """For 96 tokens and 200 words; one is not a number."""
    torch.manual_seed(0)
    found = torch.randn(96, 200)
    found[3, 5] = torch.nan
    return found.to(dtype)


CASES: dict[str, Callable[[torch.dtype], tuple[Any, tuple[Any, ...]]]] = {
    "mm": lambda dtype: (aten.mm.default, (scores(dtype), scores(dtype).t())),
    "addmm": lambda dtype: (aten.addmm.default, (scores(dtype)[0, :96], scores(dtype), scores(dtype).t())),
    "bmm": lambda dtype: (aten.bmm.default, (scores(dtype).view(2, 48, 200), scores(dtype).view(2, 200, 48))),
    "add": lambda dtype: (aten.add.Tensor, (scores(dtype), scores(dtype)[:, :1])),
    "mul": lambda dtype: (aten.mul.Tensor, (scores(dtype), 0.5)),
    "gelu": lambda dtype: (aten.gelu.default, (scores(dtype),)),
    "log_softmax": lambda dtype: (aten._log_softmax.default, (scores(dtype), 1, False)),
    "log_softmax's gradient": lambda dtype: (
        aten._log_softmax_backward_data.default,
        (scores(dtype), scores(dtype), 1, dtype),
    ),
    "cat": lambda dtype: (aten.cat.default, ([scores(dtype), scores(dtype)], 1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_are_eagers_to_the_bit(plain: list[Any], name: str, dtype: torch.dtype) -> None:
    target, args = CASES[name](dtype)
    expected = target(*args)
    for _ in range(2):  # the second time in memory that has been written to
        found = room.with_buffer(target)(dtype, tuple(expected.shape), *args)
        assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        found.fill_(7)
        del found
    assert plain == [tuple(expected.shape)] * 2


class WrittenIntoPlaces(TorchDispatchMode):
    """Runs operators that can be told where to write their result a second time, told so."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Any] = Counter()
        self.other: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if room.out_overload(func) is None:
            return func(*args, **kwargs)
        before = torch.get_rng_state()
        expected = func(*args, **kwargs)
        if expected.ndim and expected.is_contiguous():  # no result without dimensions is large
            after = torch.get_rng_state()
            torch.set_rng_state(before)
            found = room.with_buffer(func)(expected.dtype, tuple(expected.shape), *args, **kwargs)
            self.seen[func] += 1
            is_same = found.shape == expected.shape and found.dtype == expected.dtype and found.is_contiguous()
            if not is_same or not torch.equal(torch.get_rng_state(), after) or not _equal(found, expected):
                self.other.append(f"{func} {tuple(expected.shape)} {expected.dtype}")
        return expected


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(0), other.nan_to_num(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_operator_gives_the_same_bits_in_memory_full_of_rubbish(
    plain: list[tuple[int, ...]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that torch's own samples of its operators call, in both directions."""
    for module in (common_utils, core):
        monkeypatch.setattr(module, "extract_test_fn", lambda: None)  # walks through pytest's stack for each operator
    watch = WrittenIntoPlaces()
    warnings.simplefilter("ignore")  # pytest brings them back
    torch.manual_seed(0)
    for op in operators(dtype):
        if op.name in {"to_sparse", "special.i1", "special.i1e"}:  # no gradient for dense ones, or for bfloat16
            continue
        for sample in islice(op.sample_inputs("cpu", dtype, requires_grad=True), 6):
            with watch:
                results = pytree.tree_leaves(op(sample.input, *sample.args, **sample.kwargs))
                roots = [item for item in results if isinstance(item, Tensor) and item.requires_grad]
                if roots:
                    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    assert not watch.other
    assert len(plain) == watch.seen.total() > 5000
    assert watch.seen.keys() >= {aten.mm.default, aten.gelu_backward.default, aten.sum.dim_IntList, aten.cat.default}


def test_any_operator_of_pytorch_can_be_asked_for_its_place() -> None:
    """Some have overloads that only TorchScript knows, such as `mul.left_t`, which repeats a list."""
    packets = [getattr(aten, name) for name in dir(aten)]
    overloads = [
        getattr(packet, name)
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for name in packet.overloads()
    ]
    places = {target: room.out_overload(target) for target in overloads}
    assert places[aten.mul.Tensor] == (aten.mul.out, "out")
    assert places[aten.mul.Scalar] is None


@pytest.mark.parametrize("target", [aten.clone.default, aten.embedding.default, aten.native_layer_norm.default, len])
def test_what_pytorch_would_copy_is_left_to_it(target: Any) -> None:
    assert room.out_overload(target) is None


class Head(nn.Module):
    """The scores of words, and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 300, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x).relu()), labels)


HEAD = ["aten.mm.default", "aten._log_softmax.default", "ort_accel.cross_entropy_backward.default"]


def steps_of_a_head(in_pytorch: Sequence[str], memory: dict[str, Any], noted: list[Any]) -> Iterator[int]:
    """Steps that are eager's, each with its number of rows. `noted` has what this step alone noted."""
    torch.manual_seed(0)
    eager = Head()
    engine = {"run_in_pytorch": list(in_pytorch)}
    config = {"compute": {"native": False}, "engine": engine, "memory": memory, "observe": {"log_level": "error"}}
    ours = ort_accel.accelerate(copy.deepcopy(eager), config)
    for seed, rows in enumerate([64, 48, 48, 8, 0, 80]):
        x, labels = torch.randn(rows, 16), torch.randint(0, 300, (rows,))
        noted.clear()
        found, expected = (step(model, x, labels, seed=seed) for model in (ours, eager))
        torch.testing.assert_close(vars(found), vars(expected), rtol=1e-4, atol=1e-5, equal_nan=True)
        yield rows


@pytest.mark.parametrize("gaps", [True, False])
@pytest.mark.parametrize("memory", [{}, {"level": 1}], ids=["for speed", "memory is saved"])
def test_results_lie_in_plain_blocks_where_pytorch_would_leave_gaps(
    plain: list[tuple[int, ...]], memory: dict[str, Any], gaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "fragments_heap", lambda: gaps)
    for rows in steps_of_a_head([*HEAD, "aten.addmm"], memory, plain):
        assert plain.count((rows, 300)) == (2 if gaps else 0), "scores and logarithms"
        assert plain.count((rows, 16)) >= (1 if gaps else 0), "of the body"
