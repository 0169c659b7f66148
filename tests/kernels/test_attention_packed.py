"""Attention over rows gives on any device what PyTorch's fused kernel for the CPU gives, gradients too."""

import pytest
import torch

from ort_accel.kernels import attention_native, attention_packed, attention_precision, packed_spans
from ort_accel.kernels.attention_packed import CAUSAL, FULL, MASKED
from ort_accel.kernels.packed_rows import own


def tensors_of(dtype):
    torch.manual_seed(0)
    return [torch.randn(rows, 2, 8, dtype=dtype, requires_grad=True) for rows in (7, 9, 9)]


def slope(out):
    return torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)


QUERIES, KEYS = torch.tensor([0, 1, 2, 12, 13, 14, 15]), torch.tensor([0, 1, 2, 3, 13, 14, 15, 16, 17])
"""The positions of queries and keys in a batch of two rows with nine tokens each."""


def step(kind, mask, dtype, kept=None, keep=1.0, given=None):
    tensors = given or tensors_of(dtype)
    spans = torch.tensor([[0, 3, 0, 4, kind], [3, 7, 4, 9, kind]])
    rows = QUERIES.clone(), KEYS.clone()
    out, _ = own.scaled_dot_product_of_rows(*tensors, spans, *rows, mask, kept, keep, 0.3)
    out.backward(slope(out))
    return [out.detach(), *(tensor.grad for tensor in tensors)]


def mask_for(kind):
    if kind != MASKED:
        return None
    mask = torch.rand(2, 1, 9, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[..., 0] = True
    mask = mask[:, :, None, :].expand(2, 1, 9, 9).contiguous()
    mask[1, ..., 4] = True
    return mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [FULL, CAUSAL, MASKED], ids=["full", "causal", "masked"])
def test_products_are_the_fused_kernel(kind, dtype, monkeypatch):
    mask = mask_for(kind)
    expected = step(kind, mask, dtype)
    monkeypatch.setattr(attention_packed._Attention, "is_fused", False)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(step(kind, mask, dtype), expected, **tolerance)


@pytest.mark.parametrize("keep", [0.7, 0.0])
@pytest.mark.parametrize("kind", [FULL, CAUSAL, MASKED], ids=["full", "causal", "masked"])
def test_dropout_is_that_of_its_definition(kind, keep):
    mask = mask_for(kind)
    kept = torch.rand(2, 2, 9, 9, generator=torch.Generator().manual_seed(2)) < keep
    out, *grads = step(kind, mask, torch.float64, kept, keep)
    tensors = tensors_of(torch.float64)
    pieces = []
    for number, (q, k) in enumerate(((slice(0, 3), slice(0, 4)), (slice(3, 7), slice(4, 9)))):
        query, key, value = tensors[0][q].transpose(0, 1), tensors[1][k].transpose(0, 1), tensors[2][k].transpose(0, 1)
        scores = query @ key.mT * 0.3
        places = QUERIES[q] % 9, KEYS[k] % 9
        allowed = torch.ones(scores.shape[1:], dtype=torch.bool)
        if kind == CAUSAL:
            allowed = allowed.tril()
        if kind == MASKED:
            allowed = mask[number, 0][places[0]][:, places[1]]
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
        weights = weights * kept[number][:, places[0]][:, :, places[1]] * (1 / keep if keep else 0)
        pieces.append((weights @ value).transpose(0, 1))
    expected = torch.cat(pieces)
    expected.backward(slope(expected))
    torch.testing.assert_close([out, *grads], [expected.detach(), *(tensor.grad for tensor in tensors)])


@pytest.mark.parametrize("keep", [0.7, 1.0])
@pytest.mark.parametrize("kind", [FULL, CAUSAL, MASKED], ids=["full", "causal", "masked"])
def test_sequences_that_are_alike_run_together(kind, keep, monkeypatch):
    """Two whole sequences, and two that lack their first token, between which one is shorter."""
    torch.manual_seed(0)
    lengths, starts = [4, 4, 2, 3, 3], [0, 0, 0, 1, 1]
    rows = torch.cat([torch.arange(n) + s + 4 * i for i, (n, s) in enumerate(zip(lengths, starts, strict=True))])
    ends = torch.tensor(lengths).cumsum(0)
    begins = ends - torch.tensor(lengths)
    spans = torch.stack([begins, ends, begins, ends, torch.full((5,), kind)], 1)
    mask = (torch.rand(5, 1, 4, 4) > 0.3) | torch.eye(4, dtype=torch.bool) if kind == MASKED else None
    kept = torch.rand(5, 2, 4, 4) < keep if keep < 1 else None
    tensors = [torch.randn(16, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    counts = []
    runs = packed_spans.Pairs.batches

    def watched(self, *how):
        found = runs(self, *how)
        counts.append([run.sequences for run in found])
        return found

    monkeypatch.setattr(packed_spans.Pairs, "batches", watched)
    together = gradients(
        own.scaled_dot_product_of_rows(*tensors, spans, rows, rows, mask, kept, keep, None)[0], tensors
    )
    assert counts == [[2, 1, 2], [2, 1, 2]]
    monkeypatch.setattr(packed_spans.Pairs, "_form", lambda self, sequence: sequence.number)
    again = spans.clone(), rows, rows, mask, kept, keep, None
    alone = gradients(own.scaled_dot_product_of_rows(*tensors, *again)[0], tensors)
    assert counts[2:] == [[1] * 5, [1] * 5]
    torch.testing.assert_close(together, alone)


@pytest.fixture
def without_native_kernels(monkeypatch):
    """Attention runs as it does where the native library is missing."""
    monkeypatch.setattr(attention_native, "runs", lambda *_: False)


def test_layers_of_one_batch_share_which_sequences_are_alike(monkeypatch, without_native_kernels):
    asked = []
    form = packed_spans.Pairs._form
    monkeypatch.setattr(packed_spans.Pairs, "_form", lambda *how: asked.append(1) or form(*how))
    spans, rows = torch.tensor([[0, 3, 0, 3, FULL], [3, 7, 3, 7, FULL]]), torch.arange(7)
    tensors = [torch.randn(7, 2, 8, requires_grad=True) for _ in range(3)]

    def layer(pairs):
        out = own.scaled_dot_product_of_rows(*tensors, spans, rows, rows, pairs, None, 1.0, None)[0]
        gradients(out, tensors)

    for _ in range(3):
        layer(None)
    assert len(asked) == 2
    layer(torch.ones(2, 1, 7, 7, dtype=torch.bool))
    assert len(asked) == 4


@pytest.fixture
def _no_memory_is_blank():
    """What PyTorch gives as memory to write to is full of NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("_no_memory_is_blank")
@pytest.mark.parametrize("keep", [0.7, 1.0])
@pytest.mark.parametrize(
    "spans",
    [
        [[0, 3, 0, 4], [3, 7, 4, 9]],
        [[0, 3, 0, 4], [3, 7, 4, 8]],
        [[0, 3, 0, 4], [3, 6, 4, 9]],
        [[0, 3, 0, 4], [3, 7, 4, 4]],
        [[0, 3, 0, 4], [3, 3, 4, 9]],
    ],
    ids=["all rows", "a key apart", "a query apart", "queries without keys", "keys without queries"],
)
def test_every_row_is_written_or_zero(spans, keep):
    torch.manual_seed(0)
    rows = torch.arange(7), torch.arange(9)
    kept = torch.rand(2, 2, 10, 10) < keep if keep < 1 else None
    tensors = [torch.randn(count, 2, 8, requires_grad=True) for count in (7, 9, 9)]
    told = torch.tensor([[*span, FULL] for span in spans])
    out = own.scaled_dot_product_of_rows(*tensors, told, *rows, None, kept, keep, None)[0]
    for found, sides in zip(gradients(out, tensors), (slice(0, 2), slice(0, 2), slice(2, 4), slice(2, 4)), strict=True):
        attending = [span[sides] for span in spans if span[0] < span[1] and span[2] < span[3]]
        written = {row for begin, end in attending for row in range(begin, end)}
        assert not found.isnan().any()
        assert {row for row in range(len(found)) if found[row].any()} == written


@pytest.mark.parametrize("keep", [0.7, 1.0])
def test_a_sequence_without_keys_gives_zeros_and_the_others_what_they_give_alone(keep):
    torch.manual_seed(0)
    spans = torch.tensor([[0, 3, 0, 4, FULL], [3, 5, 4, 4, FULL], [5, 7, 4, 9, FULL]])
    rows = torch.tensor([0, 1, 2, 5, 6, 10, 11]), torch.tensor([0, 1, 2, 3, 10, 11, 12, 13, 14])
    kept = torch.rand(3, 2, 5, 5) < keep if keep < 1 else None
    tensors = [torch.randn(count, 2, 8, dtype=torch.float64, requires_grad=True) for count in (7, 9, 9)]
    out = own.scaled_dot_product_of_rows(*tensors, spans, *rows, None, kept, keep, None)[0]
    grads = torch.autograd.grad(out, tensors, slope(out))
    assert not out[3:5].any()
    assert not grads[0][3:5].any()
    for number, q, k in ((0, slice(0, 3), slice(0, 4)), (2, slice(5, 7), slice(4, 9))):
        span = torch.tensor([[0, q.stop - q.start, 0, k.stop - k.start, FULL]])
        part = None if kept is None else kept[number : number + 1]
        own_rows = [row[where] % 5 for row, where in zip(rows, (q, k), strict=True)]
        own_tensors = [tensor[at].detach().requires_grad_() for tensor, at in zip(tensors, (q, k, k), strict=True)]
        alone = own.scaled_dot_product_of_rows(*own_tensors, span, *own_rows, None, part, keep, None)[0]
        torch.testing.assert_close(out[q], alone)
        expected = torch.autograd.grad(alone, own_tensors, slope(out)[q])
        torch.testing.assert_close([grad[at] for grad, at in zip(grads, (q, k, k), strict=True)], list(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [FULL, CAUSAL, MASKED], ids=["full", "causal", "masked"])
def test_sixteen_bits_are_at_least_as_precise_as_pytorchs_kernel(kind, dtype, monkeypatch):
    mask = mask_for(kind)
    rounded = [tensor.detach().to(dtype) for tensor in tensors_of(torch.float32)]

    def run(wide):
        return step(kind, mask, wide, given=[tensor.to(wide).requires_grad_() for tensor in rounded])

    precise, ours = run(torch.float64), run(dtype)
    monkeypatch.setattr(attention_precision, "is_faster_in_float32", lambda *_: False)
    plain = run(dtype)
    for right, one, other in zip(precise, ours, plain, strict=True):
        assert one.dtype == other.dtype == dtype
        error, allowed = ((found.double() - right).norm() for found in (one, other))
        assert error <= 1.1 * allowed


def test_sequences_whose_weights_are_many_run_a_few_at_a_time(monkeypatch, without_native_kernels):
    """Seven alike sequences, of which the weights of three at a time are allowed; the bits are those of all at once."""
    torch.manual_seed(0)
    ends = torch.arange(1, 8) * 4
    spans = torch.stack([ends - 4, ends, ends - 4, ends, torch.full((7,), FULL)], 1)
    rows, kept = torch.arange(28), torch.rand(7, 2, 4, 4) < 0.7
    tensors = [torch.randn(28, 2, 8, requires_grad=True) for _ in range(3)]
    sizes = []
    weights = attention_packed._weights

    def watched(*how):
        sizes.append(how[-1].sequences)
        return weights(*how)

    monkeypatch.setattr(attention_packed, "_weights", watched)
    found = []
    for at_once in (7, 3):
        monkeypatch.setattr(attention_packed, "pairs_at_once", lambda most=at_once * 2 * 4 * 4: most)
        out = own.scaled_dot_product_of_rows(*tensors, spans, rows, rows, None, kept, 0.7, None)[0]
        found.append(gradients(out, tensors))
    assert sizes == [7, 7, 3, 3, 1, 3, 3, 1]
    for whole, part in zip(*found, strict=True):
        assert torch.equal(whole, part)


def test_spans_are_read_once_while_they_live(monkeypatch):
    """By all layers and their gradients; other rows, and other spans in their memory, are read anew."""
    read = []
    stretch = packed_spans._row_range
    monkeypatch.setattr(packed_spans, "_row_range", lambda *how: read.append(1) or stretch(*how))
    query, key, value = tensors_of(torch.float64)
    spans, rows = torch.tensor([[0, 3, 0, 4, FULL], [3, 7, 4, 9, FULL]]), (torch.arange(7), torch.arange(9))

    def result(spans, *places):
        return own.scaled_dot_product_of_rows(query, key, value, spans, *places, None, None, 1.0, 0.3)[0]

    first = result(spans, *rows).detach()
    gradients(result(spans, *rows), [query, key, value])
    assert len(read) == 4
    torch.testing.assert_close(result(spans, *(row.clone() for row in rows)).detach(), first)
    assert len(read) == 8
    before = len(packed_spans._PARSED)
    del spans
    assert len(packed_spans._PARSED) == before - 1


@pytest.mark.parametrize("kind", [FULL, CAUSAL], ids=["full", "causal"])
def test_rows_before_between_and_behind_those_that_attend_are_zeros(kind):
    torch.manual_seed(0)
    spans = torch.tensor([[0, 2, 0, 0, kind], [2, 5, 2, 5, kind], [5, 7, 7, 7, kind], [7, 9, 7, 9, kind]])
    rows = torch.tensor([0, 1, 10, 11, 12, 20, 21, 30, 31, 32])
    tensors = [torch.randn(10, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    out = own.scaled_dot_product_of_rows(*tensors, spans, rows, rows, None, None, 1.0, None)[0]
    found = gradients(out, tensors)
    attending = torch.tensor([2, 3, 4, 7, 8])
    for whole in found:
        assert whole.shape == (10, 2, 8)
        assert not whole.index_fill(0, attending, 0).any()
    for where in (slice(2, 5), slice(7, 9)):
        alone = [tensor.detach()[where].transpose(0, 1)[None].requires_grad_() for tensor in tensors]
        expected = torch.nn.functional.scaled_dot_product_attention(*alone, is_causal=kind == CAUSAL)
        slopes = slope(out)[where].transpose(0, 1)[None]
        each = [expected.detach(), *torch.autograd.grad(expected, alone, slopes)]
        for whole, part in zip(found, each, strict=True):
            torch.testing.assert_close(whole[where].transpose(0, 1)[None], part)


def test_no_sequence_gives_no_rows_and_none_that_attends_gives_zeros():
    for count in (0, 3):
        tensors = [torch.randn(count, 2, 8, requires_grad=True) for _ in range(3)]
        spans = torch.tensor([[0, count, 0, 0, FULL]] if count else [], dtype=torch.long).view(-1, 5)
        rows = torch.arange(count)
        out = own.scaled_dot_product_of_rows(*tensors, spans, rows, rows, None, None, 1.0, None)[0]
        for found in gradients(out, tensors):
            torch.testing.assert_close(found, torch.zeros(count, 2, 8))


def gradients(out, tensors):
    return [out.detach(), *torch.autograd.grad(out, tensors, slope(out))]


@pytest.mark.parametrize("operator", [own.rows_of, own.rows_into, own.scaled_dot_product_of_rows])
def test_there_is_a_kernel_for_cuda(operator):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(operator.default.name(), "CUDA")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [FULL, CAUSAL, MASKED], ids=["full", "causal", "masked"])
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("spare_keys", [0, 2], ids=["all keys", "keys that nobody looks at"])
def test_what_runs_as_a_whole_is_not_copied(dtype, kind, sequences, spare_keys, monkeypatch, without_native_kernels):
    torch.manual_seed(0)
    length = 5
    edges = torch.arange(sequences) * length
    spans = torch.stack([edges, edges + length, edges, edges + length, torch.full_like(edges, kind)], 1)
    rows = torch.arange(sequences * length)
    keys = torch.arange(sequences * length + spare_keys)
    mask = (torch.rand(sequences, 1, length, length) > 0.4) | torch.eye(length, dtype=torch.bool)
    mask = mask if kind == MASKED else None
    tensors = [torch.randn(len(of), 2, 8, dtype=dtype, requires_grad=True) for of in (rows, keys, keys)]
    writes = []
    write = attention_packed._write
    monkeypatch.setattr(attention_packed, "_write", lambda *how: writes.append(1) or write(*how))
    out, sums = own.scaled_dot_product_of_rows(*tensors, spans, rows, keys, mask, None, 1.0, None)
    found = gradients(out, tensors)
    assert len(writes) == (1 if spare_keys else 0), "only gradients of more keys than there are attended"
    assert sums.is_contiguous()
    assert all(one.is_contiguous() and one.dtype == dtype for one in found)
    monkeypatch.setattr(attention_packed, "_is_whole", lambda *how: False)
    out, copied_sums = own.scaled_dot_product_of_rows(*tensors, spans, rows, keys, mask, None, 1.0, None)
    assert all(map(torch.equal, [sums, *found], [copied_sums, *gradients(out, tensors)]))
