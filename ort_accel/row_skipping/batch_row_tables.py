"""Computes the row sets of each batch before the smaller graph runs, as tables that the graph takes as inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ort_accel.graph.symbolic_sizes import SizeFunction, SymbolSource, expression
from ort_accel.kernels.attention_packed import CAUSAL, FULL, MASKED
from ort_accel.row_skipping.attention_match import Attention
from ort_accel.row_skipping.input_graph import InputGraphWriter
from ort_accel.row_skipping.packed_sequences import Part, parts_of
from ort_accel.row_skipping.row_flow import value_of
from ort_accel.row_skipping.row_plan import RowPlan, RowSet
from ort_accel.row_skipping.row_sets import (
    Atom,
    AttendedKeys,
    Broadcast,
    FixedPosition,
    FromSlice,
    IndexedPosition,
    SizeExpression,
    Unmasked,
    ValidLabel,
    innermost,
)

aten = torch.ops.aten

MIN_ROWS = 2
"""The fewest rows of a set, and the fewest spans: the sizes 0 and 1 would be compiled on their own."""

Link = tuple[Attention, RowSet, RowSet]
"""An attention with the row sets of its queries and of its keys."""


@dataclass(frozen=True)
class BatchTables:
    """The tables of one batch."""

    gather_indices: list[Tensor]
    """For each row set, the positions of its rows, in order."""
    inverse_indices: list[Tensor]
    """For each row set and every position, its number among the rows of the set, or -1."""
    spans: list[Tensor]
    """For each varlen attention, where queries and keys of each sequence begin and end, and how it is masked."""
    densities: list[tuple[int, int]]
    """For each row set, how many rows it has, and how many there are in all."""
    pairs: list[tuple[int, int]]
    """For each varlen attention, how many pairs of query and key it computes, and how many there are in all."""
    sequences: int
    """The sequences of a batch with several in a row of tokens; 0 for any other batch."""
    fits: bool
    """True if the smaller graph gives eager mode's results.

    A needed query without any key reads padding in eager mode, so that such a batch runs on all rows.
    """

    @property
    def tables(self) -> list[Tensor]:
        """The inputs that the smaller graph takes beside the model's."""
        return [*self.gather_indices, *self.inverse_indices, *self.spans]


NO_TABLES = BatchTables([], [], [], [], [], 0, False)
"""The tables of a batch that runs on all rows."""


class RowTableBuilder:
    """Builds the tables of a plan from the inputs of each batch."""

    def __init__(self, plan: RowPlan, module: fx.GraphModule) -> None:
        self.plan = plan
        self._symbols = SymbolSource()
        for position, node in enumerate(module.graph.find_nodes(op="placeholder")):
            self._symbols.learn(position, node.meta.get("val"))
        self._writer = InputGraphWriter(module)
        self.links = _distinct(
            (a, plan.set_of[a.node], keys) for a in plan.demands.attentions.values() if (keys := plan.key_set(a))
        )
        atoms = (innermost(atom) for item in plan.sets for atom in item.atoms)
        self._read = list(dict.fromkeys(node for atom in atoms if (node := _tensor_of(atom))))
        self._masks = {link[0].node: self._writer.allowed_by(link[0]) for link in self.links}
        self._module = self._writer.finish(self._read, list(self._masks.values()))
        self._sizes: dict[sympy.Expr, SizeFunction] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_writer"}

    @property
    def is_possible(self) -> bool:
        """True if labels, masks and index tensors are known before the graph runs."""
        return all(self._writer.is_known(node) for node in self._read)

    @torch.no_grad()
    def __call__(self, inputs: Sequence[Any], with_tables: bool = True) -> BatchTables:
        """Builds the tables on the device of the inputs; without tables, counts rows only."""
        with _device_of(inputs):
            return self._build(inputs, with_tables)

    def _build(self, inputs: Sequence[Any], with_tables: bool) -> BatchTables:
        symbols: dict[str, int] = {}
        self._symbols.read(list(inputs), symbols)
        found = self._module(*inputs)
        tensors = dict(zip(self._read, found, strict=False))
        masks = dict(zip(self._masks, found[len(tensors) :], strict=True))
        analysis = _BatchAnalysis(self, tensors, masks, symbols)
        flags = analysis.row_flags()
        if analysis.fits and any(item.numel() >= MIN_ROWS > int(item.sum()) for item in flags):
            analysis.adds_rows = True
            flags = analysis.row_flags()
        densities = [(int(item.sum()), item.numel()) for item in flags]
        if not analysis.fits or any(count < MIN_ROWS for count, _ in densities):
            return NO_TABLES
        gather = [item.nonzero().squeeze(1) for item in flags]
        spans = [analysis.spans(*run, gather) for run in self.runs]
        if not analysis.fits:  # a causal attention without a mask whose queries are not its keys
            return NO_TABLES
        pairs = [analysis.pairs(one, run[0]) for one, run in zip(spans, self.runs, strict=True)]
        counts = densities, pairs, analysis.packed
        if not with_tables:
            return BatchTables([], [], [], *counts, True)
        inverse = [torch.full_like(item, -1, dtype=torch.long) for item in flags]
        for numbers, positions in zip(inverse, gather, strict=True):
            numbers[positions] = torch.arange(len(positions))
        return BatchTables(gather, inverse, spans, *counts, True)

    def example(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Returns tables of the right form, with every row in every set; none where there are too few rows."""
        symbols: dict[str, int] = {}
        self._symbols.read(list(inputs), symbols)
        counts = [self.size(item.count, symbols) for item in self.plan.sets]
        batches = [self.size(expression(value_of(run[0].query).shape[0]), symbols) for run in self.runs]
        if any(count < MIN_ROWS for count in counts):
            return []
        with _device_of(inputs):
            gather, inverse = ([torch.arange(count) for count in counts] for _ in range(2))
            spans = (torch.zeros(max(batch, MIN_ROWS), 5, dtype=torch.long) for batch in batches)
            return [*gather, *inverse, *spans]

    @cached_property
    def runs(self) -> list[Link]:
        """The varlen attentions; those of equal masks and rows are one."""
        return _distinct(self.plan.runs)

    def run_of(self, attention: Attention) -> int:
        """Returns the number of the run that has the spans of an attention."""
        keys = self.plan.key_set(attention)
        assert keys is not None
        return [_link_key(*run) for run in self.runs].index(
            _link_key(attention, self.plan.set_of[attention.node], keys)
        )

    def size(self, size: SizeExpression, symbols: dict[str, int]) -> int:
        """Returns the value of a size."""
        if isinstance(size, int):
            return size
        return self._sizes.setdefault(size, SizeFunction([size]))(symbols)[0]


def _device_of(inputs: Sequence[Any]) -> AbstractContextManager[Any]:
    """Makes new tensors on the CUDA device of a batch, if it has one."""
    return next((item.device for item in inputs if isinstance(item, Tensor) and item.is_cuda), nullcontext())


def _link_key(attention: Attention, queries: RowSet, keys: RowSet) -> tuple[object, ...]:
    masks = tuple((mask.node.target, mask.scores_position, *mask.other_arguments) for mask in attention.score_masks)
    return attention.mask, attention.is_causal, masks, queries.number, keys.number


def _distinct(links: Iterable[Link]) -> list[Link]:
    return list({_link_key(*link): link for link in links}.values())


def _tensor_of(atom: Atom) -> fx.Node | None:
    """Returns the label, mask or index tensor that an atom reads."""
    if isinstance(atom, ValidLabel):
        return atom.target
    if isinstance(atom, Unmasked):
        return atom.mask
    return atom.index if isinstance(atom, IndexedPosition) else None


class _BatchAnalysis:
    """Computes the row sets of one batch."""

    def __init__(
        self,
        builder: RowTableBuilder,
        tensors: dict[fx.Node, Tensor],
        masks: dict[fx.Node, Tensor | None],
        symbols: dict[str, int],
    ) -> None:
        self._builder, self._tensors, self._masks, self._symbols = builder, tensors, masks, symbols
        self._parts: dict[object, list[Part]] = {}
        self._causal = torch.ones(0, 0, dtype=torch.bool)
        self.fits = True
        self.packed = 0
        """The sequences of the batch, once an attention was found to have several in a row."""
        self.adds_rows = False
        """True if labels and positions add rows up to `MIN_ROWS`, with all keys that these attend to."""

    def _size(self, size: SizeExpression) -> int:
        return self._builder.size(size, self._symbols)

    def row_flags(self) -> list[Tensor]:
        """Returns, for each row set, a flag for every position; attention adds keys until nothing changes."""
        plan = self._builder.plan
        flags = {item.number: self._union(item) for item in plan.sets}
        if not self.fits:
            return []
        attended: dict[int, Tensor] = {}
        changed = True
        while changed and self.fits:
            changed = False
            for number, (attention, queries, keys) in enumerate(self._builder.links):
                query_flags = flags[queries.number]
                if attended.get(number) is query_flags:
                    continue
                attended[number] = query_flags
                reached = flags[keys.number] | self._attended_keys(attention, query_flags)
                if bool((reached != flags[keys.number]).any()):
                    flags[keys.number], changed = reached, True
        return [flags[item.number] for item in plan.sets]

    def _union(self, item: RowSet) -> Tensor:
        flags = torch.zeros(self._size(item.count), dtype=torch.bool)
        for atom in item.atoms:
            if not isinstance(atom, AttendedKeys):
                part = self._flags_of(atom)
                if part.numel() != flags.numel():  # eager mode raises: labels have another shape than the tokens
                    self.fits = False
                    return flags
                flags |= part
        return flags

    def _flags_of(self, atom: Atom) -> Tensor:
        if isinstance(atom, ValidLabel):
            return self._with_enough_rows(self._tensors[atom.target].reshape(-1) != atom.ignore_index)
        if isinstance(atom, FixedPosition):
            flags = torch.zeros(self._size(atom.size), dtype=torch.bool)
            flags[atom.index] = True
            return self._with_enough_rows(flags)
        if isinstance(atom, Unmasked):
            shown = self._tensors[atom.mask].unsqueeze(-1) != atom.masked_value
            return self._with_enough_rows(shown.flatten(2).any(2).flatten())
        if isinstance(atom, IndexedPosition):
            return self._with_enough_rows(self._indexed(atom))
        if isinstance(atom, Broadcast):
            sizes = [self._size(size) for size in atom.sizes]
            shape = [size if axis in atom.axes else 1 for axis, size in enumerate(sizes)]
            return self._flags_of(atom.inner).view(shape).expand(sizes).flatten()
        assert isinstance(atom, FromSlice)
        full, part = ([self._size(size) for size in sizes] for sizes in (atom.full_sizes, atom.slice_sizes))
        flags = torch.zeros(full, dtype=torch.bool)
        start, length = self._size(atom.start), part[atom.axis]
        flags.narrow(atom.axis, start, length).copy_(self._flags_of(atom.inner).view(part))
        return flags.flatten()

    def _indexed(self, atom: IndexedPosition) -> Tensor:
        batch, length = self._size(atom.batch), self._size(atom.length)
        flags = torch.zeros(batch, length, dtype=torch.bool)
        index = self._tensors[atom.index].long()
        if index.numel() != batch or bool(((index < -length) | (index >= length)).any()):  # eager mode raises
            self.fits = False
        else:
            flags[torch.arange(batch), index] = True
        return flags.flatten()

    def _with_enough_rows(self, flags: Tensor) -> Tensor:
        if self.adds_rows and int(flags.sum()) < MIN_ROWS:
            flags[(~flags).nonzero()[:MIN_ROWS]] = True
        return flags

    def _parts_of(self, attention: Attention) -> list[Part]:
        """Returns which keys a query may attend to, in parts that do not attend to each other."""
        key = attention.node if attention.mask is None else (attention.mask, attention.is_causal)
        if key not in self._parts:
            self._parts[key] = parts_of(self._allowed_pairs(attention), self._sizes_of(attention)[0])
        return self._parts[key]

    def _allowed_pairs(self, attention: Attention) -> Tensor:
        """Returns which keys a query may attend to: [batch, queries, keys], where batch and queries may be 1."""
        queries, keys = value_of(attention.query).shape[2], attention.key_length
        found = self._masks[attention.node]
        if found is None:
            found = torch.ones(1, 1, 1, self._size(expression(keys)), dtype=torch.bool)
        if attention.is_causal:
            square = torch.ones(self._size(expression(queries)), self._size(expression(keys)), dtype=torch.bool)
            found = found & square.tril()
        found = found[(None,) * (4 - found.ndim)]
        return found[:, 0] if found.shape[1] == 1 else found.any(1)

    def _attended_keys(self, attention: Attention, query_flags: Tensor) -> Tensor:
        """Returns flags of the keys that these queries attend to; the batch does not fit if a query has none."""
        batch, _, keys = self._sizes_of(attention)
        queries = query_flags.view(batch, -1)
        mask = self._masks[attention.node]
        if mask is not None and mask.ndim == 4 and mask.shape[1] > 1:  # each head on its own needs a key
            self.fits &= bool((mask.any(3).all(1) | ~queries).all())
        reached = torch.zeros(batch, keys, dtype=torch.bool)
        for rows, tokens, allowed in self._parts_of(attention):
            asking = queries[rows, tokens]
            self.fits &= bool((allowed.any(2) | ~asking).all())
            if allowed.shape[1] == 1:
                reached[rows, tokens] = allowed[:, 0] & asking.any(1, keepdim=True)
            else:
                reached[rows, tokens] = (allowed & asking[:, :, None]).any(1)
        return reached.flatten()

    def spans(self, attention: Attention, queries: RowSet, keys: RowSet, gather: Sequence[Tensor]) -> Tensor:
        """Returns the spans of a varlen attention, one row for each sequence.

        Columns are the begin and end of its queries, of its keys (as in `cu_seqlens`), and the kind of its mask.
        """
        batch, *lengths = self._sizes_of(attention)
        sides = [gather[rows.number] for rows in (queries, keys)]
        flags = [_flags_at(positions, batch, length) for positions, length in zip(sides, lengths, strict=True)]
        parts = self._parts_of(attention)
        of_parts = [[one[part.rows, part.tokens] for one in flags] for part in parts]
        kinds = [self._mask_kinds(attention, part.allowed, *of) for part, of in zip(parts, of_parts, strict=True)]
        counts = [torch.cat([of[side].sum(1) for of in of_parts]) for side in range(2)]
        if len(parts) > 1:
            self.packed = max(self.packed, int(((counts[0] > 0) & (counts[1] > 0)).sum()))
        missing = max(0, MIN_ROWS - len(counts[0]))
        counts = [F.pad(one, (0, missing)) for one in counts]
        ends = [one.cumsum(0) for one in counts]
        columns = [column for end, one in zip(ends, counts, strict=True) for column in (end - one, end)]
        return torch.stack([*columns, F.pad(torch.cat(kinds), (0, missing), value=FULL)], 1)

    def pairs(self, spans: Tensor, attention: Attention) -> tuple[int, int]:
        """Returns how many pairs of query and key these spans have, and how many the whole attention has."""
        query_begin, query_end, key_begin, key_end, _ = spans.T
        batch, queries, keys = self._sizes_of(attention)
        return int(((query_end - query_begin) * (key_end - key_begin)).sum()), batch * queries * keys

    def _sizes_of(self, attention: Attention) -> tuple[int, int, int]:
        """Returns the batch size, and the numbers of queries and of keys in a row."""
        shape = value_of(attention.query).shape
        batch, queries, keys = (self._size(expression(size)) for size in (shape[0], shape[2], attention.key_length))
        return batch, queries, keys

    def _up_to_own(self, length: int) -> Tensor:
        """Returns the pairs of a causal mask for so many tokens."""
        if len(self._causal) < length:
            self._causal = torch.ones(length, length, dtype=torch.bool).tril()
        return self._causal[:length, :length]

    def _mask_kinds(self, attention: Attention, allowed: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Returns how each row of a part is masked."""
        mask = self._masks[attention.node]
        is_known = attention.mask is None or (mask is not None and value_of(attention.mask).dtype == torch.bool)
        if not is_known or (mask is not None and mask.shape[1] > 1):
            return torch.full((len(queries),), MASKED)
        pairs = queries[:, :, None] & keys[:, None, :]
        is_full = (allowed | ~pairs).flatten(1).all(1)
        kinds = torch.where(is_full, FULL, MASKED)
        if queries.shape == keys.shape and not is_full.all():
            below = self._up_to_own(keys.shape[1])
            is_causal = ((allowed & pairs) == (below & pairs)).flatten(1).all(1) & (queries == keys).all(1)
            kinds = torch.where(is_causal & ~is_full, CAUSAL, kinds)
        if attention.is_causal and attention.mask is None and bool((kinds == MASKED).any()):
            self.fits = False
        return kinds


def _flags_at(positions: Tensor, batch: int, length: int) -> Tensor:
    flags = torch.zeros(batch * length, dtype=torch.bool)
    flags[positions] = True
    return flags.view(batch, length)
