"""A smaller graph makes its tensors on the device of its inputs, never on the default device."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ort_accel.capture.forward_graph import Tracer
from tests.row_skipping.modules import Attention, first_tokens, keys_of, padded
from tests.row_skipping.rewritten import Rewritten, assert_as_eager
from tests.row_skipping.test_ignored_labels import LOSSES, Head, batch


@pytest.fixture(autouse=True)
def written_with_another_default_device(monkeypatch):
    """While a smaller graph is written, a tensor made without a device is made on one that the inputs are not on."""
    trace = Tracer.smaller

    def smaller(tracer, module, write, tables):
        def elsewhere(arguments):
            with torch.device("meta"):
                return write(arguments)

        return trace(tracer, module, elsewhere, tables)

    monkeypatch.setattr(Tracer, "smaller", smaller)


@pytest.mark.parametrize("read", [first_tokens, lambda x: x[torch.arange(x.shape[0], device=x.device), 1]])
def test_a_padded_module(read):
    module = Attention(read, keys_of)
    ours = Rewritten(module)
    assert_as_eager(module, ours, *padded(2, 5, 9))
    assert ours.ran == {"some rows": 1}, ours.reasons


@pytest.mark.parametrize("name", ["mean", "one loss for each token", "class weights"])
def test_a_head_with_ignored_labels(name):
    module = Head(LOSSES[name])
    ours = Rewritten(module)
    assert_as_eager(module, ours, *batch(4, 12, 0.3))
    assert ours.ran == {"some rows": 1}, ours.reasons


def test_example_tables_lie_on_the_device_of_the_batch(monkeypatch):
    monkeypatch.setattr(torch._subclasses.fake_tensor, "init_gpu_context", lambda _: None)  # asks the driver
    module = Attention(first_tokens, keys_of)
    ours = Rewritten(module)
    ids, mask = padded(2, 5, 9)
    assert_as_eager(module, ours, ids, mask)
    taken = ours.proposal.front
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_cuda = [
            torch.empty(item.shape, dtype=item.dtype, device="cuda") if isinstance(item, torch.Tensor) else item
            for item in ours.inputs[-1]
        ]
        tables = taken.example(on_cuda)
    assert tables
    assert {table.device.type for table in tables} == {"cuda"}
