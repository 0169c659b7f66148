"""The C++ of a cluster compiles, and gives PyTorch's results, for all types, odd sizes and orders of memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ort_accel.generated.builds import why_no_code
from ort_accel.generated.clusters import Cluster
from ort_accel.generated.description import Description, Layout
from ort_accel.generated.inductor import PREAMBLE, CannotGenerate, Source, compile_library, write_source
from ort_accel.generated.worker import TOLERANCE, Value
from tests.generated.cases import CASES, whole
from tests.generated.traced import Traced, normal

pytestmark = pytest.mark.skipif(bool(why_no_code()), reason=why_no_code())


def without_gaps(tensor: Tensor) -> Tensor:
    """Returns a tensor as a session hands it to a kernel."""
    is_dense = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_dense else tensor.contiguous()


def written(name: str, cluster: Cluster) -> Source:
    return write_source(name, Description(cluster.source, name), cluster.hints)


class Kernel:
    """The kernel of a case, which is called with the tensors that its function gets."""

    def __init__(self, name: str) -> None:
        case = CASES[name]
        self._traced = Traced(case.function, case.batches[0], case.mode)
        (self.cluster,) = self._traced.all_clusters()
        self.name = f"of_{name.replace(' ', '_')}"
        self._description = Description(self.cluster.source, name)
        self.source = written(self.name, self.cluster)

    def load(self, library: ctypes.CDLL) -> None:
        self._function = library[self.name]
        self._function.restype, self._function.argtypes = ctypes.c_int64, (ctypes.c_void_p,)

    def holds(self, args: Sequence[Tensor]) -> bool:
        return all(eval(text, {}, self._sizes(args)) for text in self.source.conditions)

    def __call__(self, args: Sequence[Tensor]) -> list[Tensor]:
        placeholders = self._traced.graph.find_nodes(op="placeholder")
        given = [without_gaps(args[placeholders.index(node)]) for node in self.cluster.inputs]
        sizes = self._sizes(args)
        layouts = self._description.inputs(*sizes.values())
        assert [(x.shape, x.stride(), x.dtype) for x in given] == [(x.shape, x.strides, x.dtype) for x in layouts]
        results = [filled(each) for each in self._description.outputs(*sizes.values())]
        values = [Value(pointer=tensor.data_ptr()) for tensor in (*given, *results)]
        values += [Value(integer=size) for size in sizes.values()]
        assert self._function((Value * len(values))(*values)) == 0
        by_node = dict(zip(self.cluster.outputs, results, strict=True))
        return [by_node[node] for node in self._traced.segment.wanted]

    def _sizes(self, args: Sequence[Tensor]) -> dict[str, int]:
        """Returns the values of the cluster's symbols for tensors."""
        known: dict[str, int] = {}
        for node, tensor in zip(self._traced.graph.find_nodes(op="placeholder"), args, strict=True):
            fake = node.meta["val"]
            for symbol, size in zip((*fake.shape, *fake.stride()), (*tensor.shape, *tensor.stride()), strict=True):
                known[str(symbol)] = size
        return {f"s{at}": known[str(symbol)] for at, symbol in enumerate(self.cluster.symbols)}


def filled(layout: Layout) -> Tensor:
    """Memory that is full of what no kernel writes."""
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype).fill_(77)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kernel]:
    """The kernels of all cases, which are compiled once."""
    found = {name: Kernel(name) for name in CASES}
    source = tmp_path_factory.mktemp("kernels") / "kernels.cpp"
    source.write_text(PREAMBLE + "".join(kernel.source.text for kernel in found.values()))
    library = ctypes.CDLL(str(compile_library(source)))
    for kernel in found.values():
        kernel.load(library)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_gives_the_results_of_the_operators(name: str, kernels: dict[str, Kernel]) -> None:
    kernel, case = kernels[name], CASES[name]
    for at, batch in enumerate(case.batches):
        before = [tensor.clone() for tensor in batch]
        expected = [item for item in pytree.tree_leaves(case.function(*batch)) if isinstance(item, Tensor)]
        assert kernel.holds(batch) or at > 0, "it does not hold at the sizes of the capture"
        if kernel.holds(batch):
            for found, wanted in zip(kernel(batch), expected, strict=True):
                assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
                bound = TOLERANCE.get(wanted.dtype, 0.0)
                torch.testing.assert_close(found, wanted, rtol=bound, atol=bound, equal_nan=True)
        for tensor, old in zip(batch, before, strict=True):
            assert torch.equal(tensor, old), "it has written to what it reads"


def test_most_kernels_hold_for_other_sizes(kernels: dict[str, Kernel]) -> None:
    held = [kernels[name].holds(batch) for name, case in CASES.items() for batch in case.batches[1:]]
    assert sum(held) >= len(held) - 3


def test_intermediate_results_that_are_read_twice_lie_in_scratch_memory(kernels: dict[str, Kernel]) -> None:
    assert "Scratch scratch" in kernels["scratch memory"].source.text
    assert "Scratch scratch" not in kernels["fp32"].source.text


def test_a_condition_names_the_symbols_of_the_cluster(kernels: dict[str, Kernel]) -> None:
    conditions = kernels["scratch memory"].source.conditions
    assert conditions == ["s0 <= 4096"], "a longer sum is made in two steps"
    assert not kernels["scratch memory"].holds([normal(5000, 30)])


def test_open_sizes_are_arguments_behind_the_tensors(kernels: dict[str, Kernel]) -> None:
    text = kernels["open sizes"].source.text
    assert "const int64_t s0 = a[3].integer;" in text
    assert "const int64_t s1 = a[4].integer;" in text


def test_kernels_run_in_as_many_threads_as_pytorch_has(kernels: dict[str, Kernel]) -> None:
    assert "num_threads(" not in kernels["open sizes"].source.text
    args = [normal(700, 300), normal(700, 300)]
    expected = CASES["open sizes"].function(*args)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            torch.testing.assert_close(kernels["open sizes"](args), [expected], rtol=2e-5, atol=2e-5)
    finally:
        torch.set_num_threads(threads)


def test_an_operator_that_inductor_calls_is_refused() -> None:
    (cluster,) = Traced(lambda x, y: torch.gcd(x * 2, y) * 3, (whole(8, 8), whole(8, 8))).all_clusters()
    with pytest.raises(CannotGenerate, match="Inductor calls more than kernels: aten::gcd"):
        written("refused", cluster)


ROWS, COLUMNS = Layout(torch.float32, (4, 6), (6, 1)), Layout(torch.float32, (4, 6), (1, 4))


def described(run: Callable[..., Any], *outputs: Layout) -> Source:
    """The C++ of a function of one tensor."""
    found = Description.__new__(Description)
    found.run, found.inputs, found.outputs = run, lambda: [ROWS], lambda: outputs
    return write_source("refused", found, {})


def test_a_result_gets_the_order_of_memory_that_is_asked_for() -> None:
    assert described(lambda x: (x.sin(),), ROWS).text != described(lambda x: (x.sin(),), COLUMNS).text


def test_a_result_of_another_type_or_size_is_refused() -> None:
    for other in (Layout(torch.float64, (4, 6), (6, 1)), Layout(torch.float32, (4, 7), (7, 1))):
        with pytest.raises(CannotGenerate, match="lies in memory in another order"):
            described(lambda x: (x.sin(),), other)


def test_results_that_share_memory_are_refused() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        inner = x.sin()
        return inner, inner.view(4, 6)

    with pytest.raises(CannotGenerate, match="not memory of its own"):
        described(function, ROWS, ROWS)


def test_a_result_that_is_an_input_is_refused() -> None:
    with pytest.raises(CannotGenerate, match="not memory of its own"):
        described(lambda x: (x.view(4, 6),), ROWS)
