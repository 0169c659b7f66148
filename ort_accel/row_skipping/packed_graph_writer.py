"""Writes the smaller graph: interprets the forward graph on fake tensors, with the rows that are read packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import sympy
import torch
from torch import Tensor, fx
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.node import Argument
from torch.utils._sympy.printers import PythonPrinter

from ort_accel.graph.nodes import is_getitem, is_random, without_source_line
from ort_accel.graph.symbolic_sizes import Size, expression
from ort_accel.kernels.dropout_mask import kept
from ort_accel.kernels.packed_rows import own
from ort_accel.row_skipping.attention_match import Attention, flat_heads, match_fused_attention
from ort_accel.row_skipping.batch_row_tables import RowTableBuilder
from ort_accel.row_skipping.ignored_labels import Loss
from ort_accel.row_skipping.mutation import mutated_nodes
from ort_accel.row_skipping.row_flow import (
    Dims,
    Propagation,
    call_operator,
    other_dims,
    slice_arguments,
    tensor_input,
    value_of,
)
from ort_accel.row_skipping.row_plan import RowSet
from ort_accel.row_skipping.row_sets import SizeExpression

aten = torch.ops.aten

DROPOUTS = {aten.dropout.default}
VIEWS = {aten.view.default, aten._unsafe_view.default}


@dataclass(frozen=True)
class PackedRows:
    """Some rows of a value: rows lie along the first dimension, the dimensions without rows follow."""

    tensor: Any
    """A tensor, or several where the operator returns several."""
    dims: Dims
    rows: RowSet


class PackedGraphWriter(fx.Interpreter):
    """Interprets a graph by its plan: values are packed rows where some rows are read, and dense elsewhere."""

    def __init__(self, module: fx.GraphModule, tables: RowTableBuilder, unread: frozenset[int]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._placeholders = module.graph.find_nodes(op="placeholder")
        self._table_builder, self._plan, self._unread = tables, tables.plan, unread
        self._demands = tables.plan.demands
        self._mutated = mutated_nodes(module.graph)
        """Nodes whose rows are packed anew for each reader, since a write may lie between two of them."""
        self._packed: dict[tuple[fx.Node, Dims, int, bool], Tensor] = {}
        self._subsets: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._coordinates: dict[tuple[int, int, tuple[SizeExpression, ...]], Tensor] = {}
        self._tables: Sequence[Tensor] = ()
        self._symbols: dict[str, Size] = {}

    def write(self, inputs: Sequence[Any], tables: Sequence[Tensor]) -> list[Any]:
        """Returns the outputs, None for those that are not read."""
        self._tables = tables
        self._read_symbols(inputs)
        outputs: list[Any] = self.run(*inputs)
        return outputs

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
        if node not in self._demands.of and (attention := match_fused_attention(node)):
            if attention.dropout:
                self._draw_for_pairs(attention, 1 - attention.dropout)
            return None
        if node not in self._demands.of and not is_random(node):
            return None
        if node in self._plan.set_of:
            return self._packed_call(node)
        loss = self._demands.losses.get(node)
        if loss and (rows := self._demands.rows(loss.scores)) and rows.dims == loss.score_rows.dims:
            return self._loss(loss)
        if self._is_token_selection(node):
            return self._select_tokens(node)
        args, kwargs = fx.map_arg(node.args, self._dense), fx.map_arg(node.kwargs, self._dense)
        if node.target in VIEWS and isinstance(self.env[tensor_input(node)], PackedRows):
            return aten.reshape.default(*args)  # unpacked rows lie in another order than the view expects
        return call_operator(node, *args, **kwargs)

    def _packed_call(self, node: fx.Node) -> PackedRows:
        dims, rows = self._dims_of(node), self._plan.set_of[node]
        if is_getitem(node):
            return PackedRows(self._part(node, dims, rows), dims, rows)
        if attention := self._demands.attentions.get(node):
            return PackedRows(self._attend(attention, rows), dims, rows)
        step = self._demands.propagations.get(node)
        if step is None:  # a slice along a dimension of rows
            return PackedRows(self._slice_rows(node, dims, rows), dims, rows)
        return PackedRows(self._compute(node, step, rows), dims, rows)

    def _compute(self, node: fx.Node, step: Propagation, rows: RowSet) -> Any:
        return step.compute(_NodeInputs(self, node, rows, step.row_dims))

    def _dims_of(self, node: fx.Node) -> Dims:
        rows = self._demands.rows(node)
        assert rows is not None
        return rows.dims

    def _part(self, node: fx.Node, dims: Dims, rows: RowSet) -> Tensor:
        whole, index = self.env[tensor_input(node)], node.args[1]
        if not isinstance(whole, PackedRows):
            return self._pack(whole[index], dims, rows)
        return self._repack(node, PackedRows(whole.tensor[index], whole.dims, whole.rows), dims, rows)

    # Packing and unpacking

    def _dense(self, node: fx.Node) -> Any:
        value = self.env[node]
        return self._unpack(node, value) if isinstance(value, PackedRows) else value

    @without_source_line()
    def _unpack(self, node: fx.Node, value: PackedRows) -> Tensor:
        """Scatters packed rows into a dense tensor, with zeros in all other rows."""
        shape = value_of(node).shape
        tensor = self._scatter(value.tensor, value.rows)
        tensor = tensor.reshape([*(self.size(expression(shape[d])) for d in value.dims), *tensor.shape[1:]])
        order = [*value.dims, *other_dims(len(shape), value.dims)]
        return tensor.permute([order.index(dim) for dim in range(len(shape))])

    def packed(self, node: fx.Node, dims: Dims, rows: RowSet) -> Tensor:
        """Returns these rows of a value, whatever form it has."""
        key = (node, dims, rows.number, torch.is_grad_enabled())  # rows packed under `no_grad` have no gradient
        if key not in self._packed or node in self._mutated:
            value = self.env[node]
            is_packed = isinstance(value, PackedRows)
            self._packed[key] = self._repack(node, value, dims, rows) if is_packed else self._pack(value, dims, rows)
        return self._packed[key]

    def _repack(self, node: fx.Node, value: PackedRows, dims: Dims, rows: RowSet) -> Tensor:
        """Returns other rows of a packed value; unpacks it if these lie along other dimensions."""
        return self._subset(value, rows) if value.dims == dims else self._pack(self._unpack(node, value), dims, rows)

    @without_source_line()
    def _pack(self, dense: Tensor, dims: Dims, rows: RowSet) -> Tensor:
        return self._gather(_rows_first(dense, dims), rows)

    @without_source_line()
    def _gather(self, tensor: Tensor, rows: RowSet) -> Tensor:
        return cast("Tensor", own.rows_of(tensor, self.gather_indices(rows), self.inverse_indices(rows)))

    def _scatter(self, tensor: Tensor, rows: RowSet) -> Tensor:
        tables = self.gather_indices(rows), self.inverse_indices(rows)
        return cast("Tensor", own.rows_into(tensor, *tables, self.size(rows.count)))

    @without_source_line()
    def _subset(self, value: PackedRows, rows: RowSet) -> Tensor:
        """Returns the rows of a smaller set from packed rows of a larger one."""
        if value.rows == rows:
            return cast("Tensor", value.tensor)
        key = (value.rows.number, rows.number)
        if key not in self._subsets:
            index = self._gather(self.inverse_indices(value.rows), rows)
            inverse = self._gather(self.inverse_indices(rows), value.rows)
            self._subsets[key] = index, inverse
        return cast("Tensor", own.rows_of(value.tensor, *self._subsets[key]))

    def gather_indices(self, rows: RowSet) -> Tensor:
        """Returns the positions of the rows of a set."""
        return self._tables[rows.number]

    def inverse_indices(self, rows: RowSet) -> Tensor:
        """Returns the number in a set of every position, or -1."""
        return self._tables[len(self._plan.sets) + rows.number]

    @without_source_line()
    def coordinates(self, node: fx.Node, axis: int, rows: RowSet) -> Tensor:
        """Returns the position of each row of a set along one axis."""
        shape = tuple(expression(value_of(node).shape[dim]) for dim in self._dims_of(node))
        key = (rows.number, axis, shape)
        if key not in self._coordinates:
            found = self.gather_indices(rows)
            for size in shape[:axis:-1]:
                found = torch.div(found, self.size(size), rounding_mode="floor")
            self._coordinates[key] = torch.remainder(found, self.size(shape[axis])) if axis else found
        return self._coordinates[key]

    # Operators that are not computed row by row

    def _loss(self, loss: Loss) -> Tensor:
        rows = self._plan.set_of[loss.scores]
        scores = self.packed(loss.scores, loss.score_rows.dims, rows)
        target = self._gather(self._dense(loss.target).reshape(-1), rows)
        value = loss.of_rows(scores, target, lambda item: fx.map_arg(item, self._dense))
        if loss.reduction != 0:
            return value
        return self._scatter(value, rows).reshape([self.size(expression(s)) for s in value_of(loss.node).shape])

    def _is_token_selection(self, node: fx.Node) -> bool:
        if node.target not in {aten.select.int, aten.index.Tensor}:
            return False
        value = self.env.get(tensor_input(node))
        return isinstance(value, PackedRows) and value.dims == (0, 1)

    @without_source_line()
    def _select_tokens(self, node: fx.Node) -> Tensor:
        """Returns one token of each sequence, from packed tokens."""
        operand = tensor_input(node)
        value: PackedRows = self.env[operand]
        batch, length = (self.size(expression(size)) for size in value_of(operand).shape[:2])
        if node.target is aten.index.Tensor:
            _, positions = cast("list[fx.Node]", node.args[1])
            index = self._dense(positions).long()
            index = torch.where(index < 0, index + length, index)
        else:
            position = cast("int", node.args[2])
            index = position if position >= 0 else length + position
        inverse = self.inverse_indices(value.rows)
        wanted = torch.arange(batch, device=inverse.device) * length + index
        return _take(value.tensor, inverse.index_select(0, wanted), batch)

    @without_source_line()
    def _slice_rows(self, node: fx.Node, dims: Dims, rows: RowSet) -> Tensor:
        """Returns rows of a slice, taken from the sliced tensor."""
        operand = tensor_input(node)
        shape = value_of(operand).shape
        dim, start, *_ = slice_arguments(node)
        assert isinstance(start, int)
        first = start if start >= 0 else torch.sym_max(self.size(expression(shape[dim])) + start, 0)  # type: ignore[no-untyped-call]
        flat: Tensor | int = 0
        for axis, d in enumerate(dims):
            position = self.coordinates(node, axis, rows)
            position = position + first if d == dim else position
            flat = flat * self.size(expression(shape[d])) + position
        assert isinstance(flat, Tensor)
        value, count = self.env[operand], self.gather_indices(rows).shape[0]
        if not isinstance(value, PackedRows) or value.dims != dims:
            return _take(_rows_first(self._dense(operand), dims), flat, count)
        return _take(value.tensor, self.inverse_indices(value.rows).index_select(0, flat), count)

    def _dropout(self, node: fx.Node) -> PackedRows | None:
        """Draws the mask for all rows, as eager mode does, and applies it to the packed rows."""
        probability, training = cast("tuple[float, bool]", node.args[1:])
        rows, step = self._plan.set_of.get(node), self._demands.propagations.get(node)
        value = self._compute(node, step, rows) if step and rows else None
        if training and probability > 0:
            mask = self._draw_like(value_of(tensor_input(node)), 1 - probability)
            if rows:
                packed_mask = self._pack(mask, self._dims_of(node), rows)
                scale = 1 / (1 - probability) if probability < 1 else 0.0
                value = aten.native_dropout_backward(value, packed_mask, scale)
        return PackedRows(value, self._dims_of(node), rows) if rows else None

    def _draw_like(self, operand: Tensor, keep: float) -> Tensor:
        """Draws a dropout mask in the order in which the operand would lie in memory."""
        with disable_proxy_modes_tracing():  # the operand belongs to another trace
            order = compute_elementwise_output_logical_to_physical_perm(operand)[0]
        sizes = [self.size(expression(operand.shape[dim])) for dim in order]
        drawn = self._draw(sizes, keep, operand.device)
        return drawn.permute([order.index(dim) for dim in range(len(order))])

    def _draw(self, sizes: Sequence[Size], keep: float, device: torch.device) -> Tensor:
        """Draws a dropout mask; eager mode draws nothing where nothing is kept."""
        return kept(sizes, keep, device) if keep else torch.zeros(sizes, dtype=torch.bool, device=device)

    def _attend(self, attention: Attention, queries: RowSet) -> Tensor:
        keys = self._plan.key_set(attention)
        if keys is None or not attention.can_run_varlen:
            return self._attend_densely(attention, queries)
        run = self._table_builder.run_of(attention)
        spans = self._tables[2 * len(self._plan.sets) + run]
        dtype = value_of(attention.node).dtype  # autocast casts operands of several types to this one
        query = self.packed(attention.query, (0, 2), queries).to(dtype)
        key, value = (self.packed(item, (0, 2), keys).to(dtype) for item in (attention.key, attention.value))
        mask = None if attention.mask is None else self._dense(attention.mask)
        rows, keep = (self.gather_indices(queries), self.gather_indices(keys)), 1 - attention.dropout
        dropout_mask = self._draw_for_pairs(attention, keep) if attention.dropout else None
        result: Tensor = own.scaled_dot_product_of_rows(
            query, key, value, spans, *rows, mask, dropout_mask, keep, attention.scale
        )[0]
        return result

    def _draw_for_pairs(self, attention: Attention, keep: float) -> Tensor:
        """Draws the dropout mask of attention weights, for all pairs of query and key."""
        query, key = value_of(attention.query), value_of(attention.key)
        return self._draw([self.size(expression(s)) for s in (*query.shape[:3], key.shape[2])], keep, query.device)

    def _attend_densely(self, attention: Attention, queries: RowSet) -> Tensor:
        """Runs attention on unpacked values; masked keys are zeros there."""
        node = attention.node
        args, kwargs = fx.map_arg(node.args, self._dense), fx.map_arg(node.kwargs, self._dense)
        return self._gather(flat_heads(call_operator(node, *args, **kwargs)), queries)

    # Sizes

    def _read_symbols(self, inputs: Sequence[Any]) -> None:
        """Reads every symbol's value: from integer inputs first, then from the sizes of tensors."""
        pairs = [(node.meta.get("val"), value) for node, value in zip(self._placeholders, inputs, strict=True)]
        for known, value in pairs:
            if isinstance(known, torch.SymInt):
                self._symbols.setdefault(str(expression(known)), value)
        for known, value in pairs:
            if isinstance(known, Tensor):
                for dim, size in enumerate(known.shape):
                    if isinstance(expression(size), sympy.Symbol):
                        self._symbols.setdefault(str(expression(size)), value.shape[dim])

    def size(self, size: SizeExpression) -> Any:
        """Returns a size as the smaller graph computes it."""
        if isinstance(size, int):
            return size
        names = sorted(map(str, size.free_symbols))
        function = eval(f"lambda {', '.join(names)}: {PythonPrinter().doprint(size)}")
        return function(*(self._symbols[name] for name in names))


def _rows_first(dense: Tensor, dims: Dims) -> Tensor:
    """Flattens the dimensions that hold rows into the first one."""
    return dense.permute([*dims, *other_dims(dense.ndim, dims)]).flatten(0, len(dims) - 1)


def _take(source: Tensor, index: Tensor, count: Any) -> Tensor:
    """Gathers `count` rows by an index without repetition."""
    inverse = torch.full([source.shape[0]], -1, dtype=torch.long, device=source.device)
    inverse = inverse.index_copy(0, index, torch.arange(count, device=source.device))
    return cast("Tensor", own.rows_of(source, index, inverse))


@dataclass(frozen=True)
class _NodeInputs:
    """Gives the rule of an operator the inputs of one node."""

    writer: PackedGraphWriter
    node: fx.Node
    rows: RowSet
    row_dims: dict[fx.Node, Dims]

    def packed(self, node: fx.Node) -> Tensor:
        return self.writer.packed(node, self.row_dims[node], self.rows)

    def dense(self, value: Argument) -> Any:
        return fx.map_arg(value, self.writer._dense)

    @without_source_line()
    def gather_along(self, value: Tensor, dim: int, axis: int) -> Tensor:
        return value.movedim(dim, 0).index_select(0, self.writer.coordinates(self.node, axis, self.rows))
