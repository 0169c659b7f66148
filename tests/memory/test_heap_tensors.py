"""Tensors and copies in heap blocks: their alignment, their values, and the reuse of freed blocks."""

import pytest
import torch

from ort_accel.memory.heap_tensors import ALIGNMENT_BYTES, LEAST_BYTES, contiguous_in_heap, empty_in_heap
from ort_accel.memory.malloc_settings import disable_trimming
from tests.forked import asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(3, LEAST_BYTES), (LEAST_BYTES + 1,), (7, 0, LEAST_BYTES), (2, 3), ()], ids=str)
def test_an_empty_tensor_is_like_one_of_pytorch(shape, dtype):
    made, plain = empty_in_heap(shape, dtype), torch.empty(shape, dtype=dtype)
    assert (made.shape, made.dtype, made.stride()) == (plain.shape, plain.dtype, plain.stride())
    assert made.data_ptr() % ALIGNMENT_BYTES == 0
    made.fill_(1)
    assert made.all()


def test_a_heap_tensor_can_be_written_to_with_gradients():
    weight = torch.ones((), requires_grad=True)
    with torch.no_grad():
        made = empty_in_heap((3, LEAST_BYTES), torch.float32).fill_(2)
    made.mul_(weight).sum().backward()
    assert weight.grad == 2 * 3 * LEAST_BYTES


def test_views_keep_their_block_alive():
    values = [empty_in_heap((LEAST_BYTES,), torch.float32).fill_(number) for number in range(8)]
    views = [value[3:] for value in values]
    del values
    empty_in_heap((LEAST_BYTES,), torch.float32).fill_(9)
    assert [float(view.mean()) for view in views] == list(range(8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16, torch.float8_e5m2, torch.bool])
@pytest.mark.parametrize("shape", [(512, 300), (3, 5), (LEAST_BYTES, 0)], ids=str)
def test_a_copy_is_contiguous(shape, dtype):
    turned = torch.randn(shape).to(dtype).t()
    made, plain = contiguous_in_heap(turned), turned.contiguous()
    assert made.stride() == plain.stride()
    assert made.view(torch.uint8).equal(plain.view(torch.uint8))
    every_other = plain[::2]
    assert contiguous_in_heap(every_other).view(torch.uint8).equal(every_other.contiguous().view(torch.uint8))


def test_a_copy_resolves_lazy_conjugation():
    turned = torch.randn(300, 512, dtype=torch.complex64).conj().t()
    assert contiguous_in_heap(turned).resolve_conj().equal(turned.contiguous().resolve_conj())


def test_a_contiguous_tensor_is_not_copied():
    plain = torch.randn(2, LEAST_BYTES)
    assert [contiguous_in_heap(one).data_ptr() for one in (plain, plain[1])] == [
        one.data_ptr() for one in (plain, plain[1])
    ]


def addresses(results):
    """Put how many tensors reuse freed blocks of their size, with live blocks between them."""
    disable_trimming()
    stays, first = [], []

    def taken():
        return empty_in_heap((LEAST_BYTES // 4 + 5,), torch.float32)

    for _ in range(32):
        first.append(taken())
        stays.append(bytearray(600))
    places = {tensor.data_ptr() for tensor in first}
    first.clear()
    second = [taken() for _ in places]
    results.put(len(places.intersection(tensor.data_ptr() for tensor in second)))


def test_a_freed_block_is_reused_for_the_next_tensor():
    assert asked(addresses) >= 28
