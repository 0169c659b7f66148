"""Writes the smaller graph: every value for the rows that are read of it, by running the graph once on fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._sympy.printers import PythonPrinter

from ort_accel.graph.nodes import is_part, is_random, of_no_line
from ort_accel.graph.symbolic_sizes import expression
from ort_accel.kernels.dropout_mask import kept
from ort_accel.kernels.packed_rows import own
from ort_accel.row_skipping.attention_padding import Attention, flat_heads
from ort_accel.row_skipping.batch_row_tables import Front
from ort_accel.row_skipping.ignored_labels import Loss
from ort_accel.row_skipping.row_flow import Dims, rest_of, value_of
from ort_accel.row_skipping.row_plan import RowSet
from ort_accel.row_skipping.row_sets import Extent

aten = torch.ops.aten

DROPOUTS = {aten.dropout.default}
VIEWS = {aten.view.default, aten._unsafe_view.default}


@dataclass(frozen=True)
class Packed:
    """A value for some rows only: rows first, then the dimensions that hold none."""

    tensor: Any
    dims: Dims
    rows: RowSet


class Packing(fx.Interpreter):
    """Runs a graph with the values that were planned, packed where some rows are read."""

    def __init__(self, module: fx.GraphModule, front: Front, unread: set[int]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._front, self._plan, self._unread = front, front.plan, unread
        self._demands = front.plan.demands
        self._known: dict[Any, Any] = {}
        self._tables: Sequence[Any] = ()
        self._symbols: dict[str, Any] = {}

    def write(self, inputs: Sequence[Any], tables: Sequence[Tensor]) -> Any:
        """The outputs, None for those that are not read."""
        self._tables = tables
        self._learn(inputs)
        return self.run(*inputs)

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            values = fx.map_arg(n.args[0], lambda item: None if item not in self._demands.of else self._dense(item))
            flat = values if isinstance(values, tuple | list) else (values,)
            return [None if position in self._unread else value for position, value in enumerate(flat)]
        if n.op != "call_function":
            return super().run_node(n)
        with self._set_current_node(n):
            return self._call(n)

    def _call(self, node: fx.Node) -> Any:
        if node.target in DROPOUTS and (node not in self._demands.of or node in self._plan.set_of):
            return self._dropout(node)
        if node not in self._demands.of and not is_random(node):
            return None
        if node in self._plan.set_of:
            return self._packed_call(node)
        loss = self._demands.losses.get(node)
        if loss and (some := self._demands.rows(loss.scores)) and some.dims == loss.demand.dims:
            return self._loss(loss)
        if self._chooses(node):
            return self._chosen(node)
        args, kwargs = (fx.map_arg(item, self._dense) for item in (node.args, node.kwargs))
        if node.target in VIEWS and isinstance(self.env[node.args[0]], Packed):
            return aten.reshape.default(*args)  # what was packed lies in another order now
        return node.target(*args, **kwargs)

    def _packed_call(self, node: fx.Node) -> Packed:
        some, rows = self._demands.rows(node), self._plan.set_of[node]
        assert some is not None
        if is_part(node):
            return Packed(self._part(node, some.dims, rows), some.dims, rows)
        attention = self._demands.attentions.get(node)
        if attention:
            return Packed(self._attend(attention, rows), some.dims, rows)
        if node not in self._demands.passages:  # a slice along the rows: its rows are others of what it is taken from
            return Packed(self._of_slice(node, some.dims, rows), some.dims, rows)
        how = self._demands.passages[node]
        made = how.make(_Inputs(self, node, rows, how.needs))
        return Packed(made, some.dims, rows)

    def _part(self, node: fx.Node, dims: Dims, rows: RowSet) -> Tensor:
        whole, index = self.env[node.args[0]], node.args[1]
        if not isinstance(whole, Packed):
            return self._pack(whole[index], dims, rows)
        return self._of(node, Packed(whole.tensor[index], whole.dims, whole.rows), dims, rows)

    # Inputs of operators

    def _dense(self, node: fx.Node) -> Any:
        value = self.env[node]
        if not isinstance(value, Packed):
            return value
        return self._unpacked(node, value)

    @of_no_line()
    def _unpacked(self, node: fx.Node, value: Packed) -> Tensor:
        """A packed value with zeros in all other rows."""
        fake = value_of(node)
        count = self.size(value.rows.count)
        tensor = own.rows_into(value.tensor, self.rows(value.rows), self.places(value.rows), count)
        rest = rest_of(fake.ndim, value.dims)
        tensor = tensor.reshape([*(self.size(expression(fake.shape[d])) for d in value.dims), *tensor.shape[1:]])
        order = [*value.dims, *rest]
        return tensor.permute([order.index(dim) for dim in range(fake.ndim)])

    def packed(self, node: fx.Node, dims: Dims, rows: RowSet) -> Any:
        """A value for these rows, from whatever form it has."""
        has_gradient = torch.is_grad_enabled()  # what is packed under `no_grad` is cut off from its gradient
        key = (node, dims, rows.number, has_gradient)
        if key not in self._known:
            value = self.env[node]
            is_packed = isinstance(value, Packed)
            self._known[key] = self._of(node, value, dims, rows) if is_packed else self._pack(value, dims, rows)
        return self._known[key]

    def _of(self, node: fx.Node, value: Packed, dims: Dims, rows: RowSet) -> Tensor:
        """A packed value for rows along these dimensions; others read its rows along more of them."""
        return self._at(value, rows) if value.dims == dims else self._pack(self._unpacked(node, value), dims, rows)

    @of_no_line()
    def _pack(self, dense: Tensor, dims: Dims, rows: RowSet) -> Tensor:
        return self._rows_of(_rows_first(dense, dims), rows)

    @of_no_line()
    def _rows_of(self, tensor: Tensor, rows: RowSet) -> Tensor:
        return own.rows_of(tensor, self.rows(rows), self.places(rows))

    @of_no_line()
    def _at(self, value: Packed, rows: RowSet) -> Any:
        """A packed value for other rows: a part of its own."""
        if value.rows == rows:
            return value.tensor
        inside = ("inside", value.rows.number, rows.number)
        if inside not in self._known:
            index = own.rows_of(self.places(value.rows), self.rows(rows), self.places(rows))
            back = own.rows_of(self.places(rows), self.rows(value.rows), self.places(value.rows))
            self._known[inside] = index, back
        return own.rows_of(value.tensor, *self._known[inside])

    def rows(self, rows: RowSet) -> Tensor:
        """The places of the rows of a set."""
        return self._tables[rows.number]

    def places(self, rows: RowSet) -> Tensor:
        """For every place, its number in a set, or -1."""
        return self._tables[len(self._plan.sets) + rows.number]

    @of_no_line()
    def coordinates(self, node: fx.Node, dims: Dims, axis: int, rows: RowSet) -> Tensor:
        """Where each row of a set stands along one axis."""
        sizes = [self.size(expression(value_of(node).shape[dim])) for dim in dims]
        key = ("along", rows.number, axis, tuple(expression(value_of(node).shape[dim]) for dim in dims))
        if key not in self._known:
            found = self.rows(rows)
            for size in sizes[:axis:-1]:
                found = torch.div(found, size, rounding_mode="floor")
            self._known[key] = torch.remainder(found, sizes[axis]) if axis else found
        return self._known[key]

    # Operators with rules of their own

    def _loss(self, loss: Loss) -> Tensor:
        rows, dims = self._plan.set_of[loss.scores], loss.demand.dims
        scores = self.packed(loss.scores, dims, rows)
        target = self._rows_of(self._dense(loss.target).reshape(-1), rows)
        value = loss.of_rows(scores, target, lambda item: fx.map_arg(item, self._dense))
        if loss.reduction != 0:
            return value
        losses = own.rows_into(value, self.rows(rows), self.places(rows), self.size(rows.count))
        return losses.reshape([self.size(expression(size)) for size in value_of(loss.node).shape])

    def _chooses(self, node: fx.Node) -> bool:
        value = self.env.get(node.args[0])
        chooses = node.target in {aten.select.int, aten.index.Tensor}
        return chooses and isinstance(value, Packed) and value.dims == (0, 1)

    @of_no_line()
    def _chosen(self, node: fx.Node) -> Tensor:
        """One token of each sequence, from packed tokens."""
        given: Any = node.args[0]
        value: Packed = self.env[given]
        batch, length = (self.size(expression(size)) for size in value_of(given).shape[:2])
        index: Any = node.args[-1]
        if node.target is aten.index.Tensor:
            listed = self._dense(index[1]).long()
            place = torch.where(listed < 0, listed + length, listed)
        else:
            place = index if index >= 0 else length + index
        places = self.places(value.rows)
        wanted = torch.arange(batch, device=places.device) * length + place
        numbers = places.index_select(0, wanted)
        return _take(value.tensor, numbers, batch)

    @of_no_line()
    def _of_slice(self, node: fx.Node, dims: Dims, rows: RowSet) -> Tensor:
        """Rows of a slice, taken from what it is a slice of."""
        given: Any = node.args[0]
        dim: Any = node.args[1] if len(node.args) > 1 else 0
        start: Any = node.args[2] if len(node.args) > 2 and node.args[2] is not None else 0
        large, small = value_of(given).shape, value_of(node).shape
        first = start if start >= 0 else self.size(expression(large[dim % len(large)])) + start
        flat: Any = 0
        for axis, d in enumerate(dims):
            place = self.coordinates(node, dims, axis, rows)
            place = place + first if d == dim % len(small) else place
            flat = flat * self.size(expression(large[d])) + place
        value = self.env[given]
        if not isinstance(value, Packed) or value.dims != dims:
            dense = self._dense(given)
            dense = _rows_first(dense, dims)
            return _take(dense, flat, self.rows(rows).shape[0])
        return _take(value.tensor, self.places(value.rows).index_select(0, flat), self.rows(rows).shape[0])

    def _dropout(self, node: fx.Node) -> Any:
        """The mask is drawn for all rows, as eager mode draws it, and applied to those that are there."""
        given, probability, training = node.args
        rows, some = self._plan.set_of.get(node), self._demands.rows(node)
        how = self._demands.passages.get(node)
        value = how.make(_Inputs(self, node, rows, how.needs)) if how and rows else None
        if training and probability > 0:
            mask = self._mask(value_of(given), 1 - probability)
            if rows and some:
                here = self._pack(mask, some.dims, rows)
                scale = 1 / (1 - probability) if probability < 1 else 0.0
                value = aten.native_dropout_backward(value, here, scale)
        return Packed(value, some.dims, rows) if rows and some else None

    def _mask(self, operand: Tensor, keep: float) -> Tensor:
        """Drawn in the order in which the operand would lie in memory."""
        with disable_proxy_modes_tracing():  # the operand belongs to another trace
            order = compute_elementwise_output_logical_to_physical_perm(operand)[0]
        sizes = [self.size(expression(operand.shape[dim])) for dim in order]
        drawn = self._drawn(sizes, keep, operand.device)
        return drawn.permute([order.index(dim) for dim in range(len(order))])

    def _drawn(self, sizes: Sequence[Any], keep: float, device: torch.device) -> Tensor:
        """Nothing is drawn where nothing is kept."""
        return kept(sizes, keep, device) if keep else torch.zeros(sizes, dtype=torch.bool, device=device)

    def _attend(self, attention: Attention, queries: RowSet) -> Tensor:
        keys = self._plan.core_of(attention)
        if keys is None or not attention.can_run_by_sequence:
            return self._attend_densely(attention, queries)
        run = self._front.run_of(attention)
        spans = self._tables[2 * len(self._plan.sets) + run]
        dtype = value_of(attention.node).dtype  # under autocast, operands of other types meet in this one
        query = self.packed(attention.query, (0, 2), queries).to(dtype)
        key, value = (self.packed(item, (0, 2), keys).to(dtype) for item in (attention.key, attention.value))
        mask = None if attention.mask is None else self._dense(attention.mask)
        rows, keep = (self.rows(queries), self.rows(keys)), 1 - attention.dropout
        dropped = self._kept_pairs(attention, keep) if attention.dropout else None
        return own.scaled_dot_product_of_rows(query, key, value, spans, *rows, mask, dropped, keep, attention.scale)[0]

    def _kept_pairs(self, attention: Attention, keep: float) -> Tensor:
        """What dropout keeps of the weights, for all pairs."""
        query, key = value_of(attention.query), value_of(attention.key)
        sizes = [self.size(expression(size)) for size in (*query.shape[:3], key.shape[2])]
        return self._drawn(sizes, keep, query.device)

    def _attend_densely(self, attention: Attention, queries: RowSet) -> Tensor:
        """With zeros where nothing was computed, which are not looked at."""
        args, kwargs = (fx.map_arg(item, self._dense) for item in (attention.node.args, attention.node.kwargs))
        dense = attention.node.target(*args, **kwargs)
        return self._rows_of(flat_heads(dense), queries)

    # Sizes

    def _learn(self, inputs: Sequence[Any]) -> None:
        for node, value in zip(self.module.graph.find_nodes(op="placeholder"), inputs, strict=True):
            known = node.meta.get("val")
            if isinstance(known, torch.SymInt):
                self._symbols.setdefault(str(expression(known)), value)
        for node, value in zip(self.module.graph.find_nodes(op="placeholder"), inputs, strict=True):
            known = node.meta.get("val")
            if isinstance(known, Tensor):
                for dim, size in enumerate(known.shape):
                    if isinstance(expression(size), sympy.Symbol):
                        self._symbols.setdefault(str(expression(size)), value.shape[dim])

    def size(self, size: Extent) -> Any:
        """A size as the new graph knows it."""
        if isinstance(size, int):
            return size
        names = sorted(map(str, size.free_symbols))
        function = eval(f"lambda {', '.join(names)}: {PythonPrinter().doprint(size)}")
        return function(*(self._symbols[name] for name in names))


def _rows_first(dense: Tensor, dims: Dims) -> Tensor:
    """The dimensions that hold rows as one, and the others behind it."""
    return dense.permute([*dims, *rest_of(dense.ndim, dims)]).flatten(0, len(dims) - 1)


def _take(source: Tensor, numbers: Tensor, count: Any) -> Tensor:
    """Rows by their numbers, of which there are `count`; no row is taken twice."""
    back = torch.full([source.shape[0]], -1, dtype=torch.long, device=source.device)
    back = back.index_copy(0, numbers, torch.arange(count, device=source.device))
    return own.rows_of(source, numbers, back)


@dataclass(frozen=True)
class _Inputs:
    """The inputs of one node, for the rule of its operator."""

    packing: Packing
    node: fx.Node
    rows: RowSet
    needs: dict[fx.Node, Dims]

    def packed(self, node: fx.Node) -> Tensor:
        found = self.packing.packed(node, self.needs[node], self.rows)
        assert isinstance(found, Tensor)
        return found

    def dense(self, value: Any) -> Any:
        return fx.map_arg(value, self.packing._dense)

    @of_no_line()
    def along(self, value: Tensor, dim: int, axis: int) -> Tensor:
        some = self.packing._demands.rows(self.node)
        assert some is not None
        places = self.packing.coordinates(self.node, some.dims, axis, self.rows)
        return value.movedim(dim, 0).index_select(0, places)
