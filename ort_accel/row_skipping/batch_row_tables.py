"""What is computed in front of a smaller graph, for every batch: which rows it works on, and whether it may run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor, fx

from ort_accel.graph.requires_grad import has_gradient
from ort_accel.graph.symbolic_sizes import SizeFunction, SymbolSource, expression
from ort_accel.kernels.attention_packed import CAUSAL, FULL, MASKED
from ort_accel.row_skipping.attention_padding import Attention, Hiding
from ort_accel.row_skipping.input_roles import known_in_front
from ort_accel.row_skipping.row_flow import shape_of, value_of
from ort_accel.row_skipping.row_plan import Plan, RowSet
from ort_accel.row_skipping.row_sets import Atom, Extent, Keys, Labelled, Lifted, Listed, Marked, Place, Shifted

aten = torch.ops.aten

LEAST = 2
"""So many rows are in every set: sizes 0 and 1 would be compiled on their own."""


@dataclass
class Batch:
    """What was found in one batch."""

    rows: list[Tensor]
    places: list[Tensor]
    spans: list[Tensor]
    densities: list[tuple[int, int]]
    """For each set, how many rows are in it, of how many."""
    fits: bool
    """Whether the smaller graph gives what the whole one gives. Where a query that counts has no key to look at, what
    eager mode gives depends on padding."""

    @property
    def tables(self) -> list[Tensor]:
        """The inputs that the smaller graph has beside its own."""
        return [*self.rows, *self.places, *self.spans]


class Front:
    """Made from a plan, called with the inputs of each batch."""

    def __init__(self, plan: Plan, module: fx.GraphModule) -> None:
        self.plan = plan
        self._symbols = SymbolSource()
        for position, node in enumerate(module.graph.find_nodes(op="placeholder")):
            self._symbols.learn(position, node.meta.get("val"))
        self._writer = _Writer(module)
        self._links = _distinct(
            (a, plan.set_of[a.node], core) for a in plan.demands.attentions.values() if (core := plan.core_of(a))
        )
        atoms = (_innermost(atom) for item in plan.sets for atom in item.atoms)
        self._told = list(dict.fromkeys(told for atom in atoms if (told := _read_of(atom))))
        self._masks = {link[0].node: self._writer.allowed(link[0]) for link in self._links}
        self._module = self._writer.finish(self._told, list(self._masks.values()))
        self._sizes: dict[Any, SizeFunction] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_writer"}

    @property
    def is_possible(self) -> bool:
        """Whether labels, marks and listed places are known before the graph runs."""
        return all(self._writer.is_known(node) for node in self._told)

    @torch.no_grad()
    def __call__(self, inputs: Sequence[Any], with_tables: bool = True) -> Batch:
        """Look at a batch, on the device that it is on; without tables, only at how much of it counts."""
        with _device_of(inputs):
            return self._look(inputs, with_tables)

    def _look(self, inputs: Sequence[Any], with_tables: bool) -> Batch:
        values: dict[str, int] = {}
        self._symbols.read(list(inputs), values)
        found = self._module(*inputs)
        told = dict(zip(self._told, found, strict=False))
        masks = dict(zip(self._masks, found[len(told) :], strict=True))
        look = _Look(self, told, masks, values)
        keeps = look.sets()
        if look.fits and any(keep.numel() >= LEAST > int(keep.sum()) for keep in keeps):
            look.fills = True
            keeps = look.sets()
        densities = [(int(keep.sum()), keep.numel()) for keep in keeps]
        fits = look.fits and all(count >= LEAST for count, _ in densities)
        if not (fits and with_tables):
            return Batch([], [], [], densities if fits else [], fits)
        rows = [keep.nonzero().squeeze(1) for keep in keeps]
        places = [torch.full_like(keep, -1, dtype=torch.long) for keep in keeps]
        for place, row in zip(places, rows, strict=True):
            place[row] = torch.arange(len(row))
        spans = [look.spans(*run, rows) for run in self.runs]
        if not look.fits:  # a causal attention without a mask, of other queries than keys
            return Batch([], [], [], [], False)
        return Batch(rows, places, spans, densities, True)

    def example(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Tables of the right form, with every row in every set; none where there are too few rows."""
        with _device_of(inputs):
            return self._example(inputs)

    def _example(self, inputs: Sequence[Any]) -> list[Tensor]:
        values: dict[str, int] = {}
        self._symbols.read(list(inputs), values)
        counts = [self.size(item.count, values) for item in self.plan.sets]
        batches = [self.size(expression(value_of(run[0].query).shape[0]), values) for run in self.runs]
        if any(count < LEAST for count in counts):
            return []
        rows, places = ([torch.arange(count) for count in counts] for _ in range(2))
        return [*rows, *places, *(torch.zeros(batch, 5, dtype=torch.long) for batch in batches)]

    @cached_property
    def runs(self) -> list[tuple[Attention, RowSet, RowSet]]:
        """Attention that runs by sequence; those of equal masks and rows are one."""
        return _distinct(iter(self.plan.runs))

    def run_of(self, attention: Attention) -> int:
        """The number of the run that has the spans of an attention."""
        keys = [_link_key(*run) for run in self.runs]
        core = self.plan.core_of(attention)
        assert core is not None
        return keys.index(_link_key(attention, self.plan.set_of[attention.node], core))

    def size(self, size: Extent, values: dict[str, int]) -> int:
        """The value of a size."""
        if isinstance(size, int):
            return size
        function = self._sizes.setdefault(size, SizeFunction([size]))
        return function(values)[0]


def _device_of(inputs: Sequence[Any]) -> AbstractContextManager[Any]:
    """Make new tensors on the CUDA device of a batch; on the CPU where it is there."""
    return next((item.device for item in inputs if isinstance(item, Tensor) and item.is_cuda), nullcontext())


def _link_key(attention: Attention, queries: RowSet, keys: RowSet) -> Any:
    steps = tuple((hiding.step.target, hiding.at, *hiding.beside) for hiding in attention.hidden_by)
    return attention.mask, attention.is_causal, steps, queries.number, keys.number


def _distinct(links: Any) -> list[tuple[Attention, RowSet, RowSet]]:
    return list({_link_key(*link): link for link in links}.values())


def _innermost(atom: Atom) -> Atom:
    return _innermost(atom.inner) if isinstance(atom, Shifted | Lifted) else atom


def _read_of(atom: Atom) -> fx.Node | None:
    """What tells the rows of an atom, if anything does."""
    if isinstance(atom, Labelled):
        return atom.target
    if isinstance(atom, Marked):
        return atom.mark
    return atom.index if isinstance(atom, Listed) else None


class _Look:
    """One batch while it is looked at."""

    def __init__(self, front: Front, told: dict[fx.Node, Tensor], masks: dict[fx.Node, Any], values: Any) -> None:
        self._front, self._told, self._masks, self._values = front, told, masks, values
        self._allows: dict[fx.Node, Tensor] = {}
        self.fits = True
        self.fills = False
        """Whether labels and places take some rows more, with all that follows from them: no set may be too small."""

    def _size(self, size: Extent) -> int:
        return self._front.size(size, self._values)

    def sets(self) -> list[Tensor]:
        """For each set, which rows are in it."""
        plan = self._front.plan
        keeps = {item.number: self._union(item) for item in plan.sets}
        if not self.fits:
            return []
        asked: dict[int, Tensor] = {}
        changed = True
        while changed and self.fits:
            changed = False
            for number, (attention, queries, keys) in enumerate(self._front._links):
                asking = keeps[queries.number]
                if asked.get(number) is asking:
                    continue
                asked[number] = asking
                reached = keeps[keys.number] | self._reached(attention, asking)
                if bool((reached != keeps[keys.number]).any()):
                    keeps[keys.number], changed = reached, True
        return [keeps[item.number] for item in plan.sets]

    def _union(self, item: RowSet) -> Tensor:
        keep = torch.zeros(self._size(item.count), dtype=torch.bool)
        for atom in item.atoms:
            if not isinstance(atom, Keys):
                part = self._keep(atom)
                if part.numel() != keep.numel():  # labels of another shape than the tokens: eager mode says so
                    self.fits = False
                    return keep
                keep |= part
        return keep

    def _keep(self, atom: Atom) -> Tensor:
        if isinstance(atom, Labelled):
            return self._filled(self._told[atom.target].reshape(-1) != atom.ignore_index)
        if isinstance(atom, Place):
            keep = torch.zeros(self._size(atom.size), dtype=torch.bool)
            keep[atom.index] = True
            return self._filled(keep)
        if isinstance(atom, Marked):
            shown = self._told[atom.mark].unsqueeze(-1) != atom.hides
            return self._filled(shown.flatten(2).any(2).flatten())
        if isinstance(atom, Listed):
            return self._filled(self._listed(atom))
        if isinstance(atom, Lifted):
            sizes = [self._size(size) for size in atom.sizes]
            shape = [size if axis in atom.axes else 1 for axis, size in enumerate(sizes)]
            return self._keep(atom.inner).view(shape).expand(sizes).flatten()
        assert isinstance(atom, Shifted)
        large, small = ([self._size(size) for size in sizes] for sizes in (atom.large, atom.small))
        keep = torch.zeros(large, dtype=torch.bool)
        keep.narrow(atom.axis, self._size(atom.start), small[atom.axis]).copy_(self._keep(atom.inner).view(small))
        return keep.flatten()

    def _listed(self, atom: Listed) -> Tensor:
        batch, length = self._size(atom.batch), self._size(atom.length)
        keep = torch.zeros(batch, length, dtype=torch.bool)
        index = self._told[atom.index].long()
        if index.numel() != batch or bool(((index < -length) | (index >= length)).any()):  # eager mode says so
            self.fits = False
        else:
            keep[torch.arange(batch), index] = True
        return keep.flatten()

    def _filled(self, keep: Tensor) -> Tensor:
        if self.fills and int(keep.sum()) < LEAST:
            keep[(~keep).nonzero()[:LEAST]] = True
        return keep

    def _allowed(self, attention: Attention) -> Tensor:
        """[batch, queries, keys], where each but the last may be 1: which keys a query may look at."""
        if attention.node not in self._allows:
            self._allows[attention.node] = self._find_allowed(attention)
        return self._allows[attention.node]

    def _find_allowed(self, attention: Attention) -> Tensor:
        shape = value_of(attention.query).shape
        queries, keys = shape[2], attention.key_length
        found = self._masks[attention.node]
        if found is None:
            found = torch.ones(1, 1, 1, self._size(expression(keys)), dtype=torch.bool)
        if attention.is_causal:
            square = torch.ones(self._size(expression(queries)), self._size(expression(keys)), dtype=torch.bool)
            found = found & square.tril()
        found = found[(None,) * (4 - found.ndim)]
        return found[:, 0] if found.shape[1] == 1 else found.any(1)

    def _by_sequence(self, attention: Attention, keep: Tensor) -> Tensor:
        return keep.view(self._size(expression(value_of(attention.query).shape[0])), -1)

    def _reached(self, attention: Attention, queries: Tensor) -> Tensor:
        """The keys that these queries look at. Each must have one."""
        allowed, asking = self._allowed(attention), self._by_sequence(attention, queries)
        self.fits &= bool((allowed.any(2) | ~asking).all())
        if allowed.shape[1] == 1:
            reached = allowed[:, 0] & asking.any(1, keepdim=True)
        else:
            reached = (allowed & asking[:, :, None]).any(1)
        return reached.flatten()

    def spans(self, attention: Attention, queries: RowSet, keys: RowSet, rows: Sequence[Tensor]) -> Tensor:
        """For each sequence, its queries, its keys, and how these attend to those."""
        shape = value_of(attention.query).shape
        batch, query_length = self._size(expression(shape[0])), self._size(expression(shape[2]))
        key_length = self._size(expression(attention.key_length))
        own = [(queries, query_length), (keys, key_length)]
        counts = [torch.bincount(rows[item.number] // length, minlength=batch) for item, length in own]
        ends = [count.cumsum(0) for count in counts]
        kinds = self._kinds(attention, *(self._dense(rows[item.number], batch, length) for item, length in own))
        columns = [column for end, count in zip(ends, counts, strict=True) for column in (end - count, end)]
        return torch.stack([*columns, kinds], 1)

    @staticmethod
    def _dense(rows: Tensor, batch: int, length: int) -> Tensor:
        keep = torch.zeros(batch * length, dtype=torch.bool)
        keep[rows] = True
        return keep.view(batch, length)

    def _kinds(self, attention: Attention, queries: Tensor, keys: Tensor) -> Tensor:
        if attention.mask is not None and value_of(attention.mask).dtype != torch.bool:
            return torch.full((len(queries),), MASKED)
        mask = self._masks[attention.node]
        if mask is not None and mask.shape[1] > 1:
            return torch.full((len(queries),), MASKED)
        allowed = self._allowed(attention)
        pairs = queries[:, :, None] & keys[:, None, :]
        is_full = (allowed | ~pairs).flatten(1).all(1)
        kinds = torch.where(is_full, FULL, MASKED)
        if queries.shape == keys.shape and not is_full.all():
            below = torch.ones(queries.shape[1], keys.shape[1], dtype=torch.bool).tril()
            is_causal = ((allowed & pairs) == (below & pairs)).flatten(1).all(1) & (queries == keys).all(1)
            kinds = torch.where(is_causal & ~is_full, CAUSAL, kinds)
        if attention.is_causal and attention.mask is None and bool((kinds == MASKED).any()):
            self.fits = False
        return kinds


class _Writer:
    """Writes the part of a graph that needs inputs only, and what masks allow."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._owner, self._graph = module, fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        known = known_in_front(module.graph)
        for node in module.graph.nodes:
            if node in known:
                self._copies[node] = self._graph.node_copy(node, self._copies.__getitem__)

    def is_known(self, node: fx.Node) -> bool:
        """Whether a value can be computed in front of the graph."""
        return node in self._copies and not has_gradient(node)

    def _call(self, target: Any, *args: Any) -> fx.Node:
        return self._graph.call_function(target, args)

    def allowed(self, attention: Attention) -> fx.Node | None:
        """A node that tells which keys a query may look at; None where a mask tells nothing."""
        if attention.mask is not None:
            return self._allows(attention.mask)
        told: list[fx.Node] = []
        for hiding in attention.hidden_by:
            shown = self._shows(hiding)
            if shown is not None:
                told.append(shown)
            elif not _adds(hiding.step):  # it may show again what was hidden before
                break
        return reduce(lambda one, other: self._call(aten.logical_and.default, one, other), told) if told else None

    def _shows(self, hiding: Hiding) -> fx.Node | None:
        """Which scores an operator on them does not hide; None where that is not known."""
        step = hiding.step
        low = torch.finfo(value_of(step).dtype).min / 2
        if _adds(step):
            (added,) = hiding.beside
            return self._allows(added) if isinstance(added, fx.Node) and shape_of(added) else None
        condition, put = hiding.beside  # a `where` keeps the scores where its condition holds, or where it does not
        if not _puts_low(put, low) or condition not in self._copies:
            return None
        kept = self._copies[condition]
        chooses = getattr(step.target, "overloadpacket", None) is aten.where and hiding.at == 1
        return kept if chooses else self._call(aten.logical_not.default, kept)

    def _allows(self, mask: fx.Node) -> fx.Node | None:
        value = value_of(mask)
        low = torch.finfo(value.dtype).min / 2 if value.is_floating_point() else 0
        if value.dtype == torch.bool:
            return self._copies.get(mask)
        packet = getattr(mask.target, "overloadpacket", None)
        if packet is aten.where and _is_low(mask.args[2], low):
            return self._both(self._copies.get(mask.args[0]), mask.args[1], low)
        if packet is aten.masked_fill and _is_low(mask.args[2], low) and mask.args[1] in self._copies:
            return self._both(self._call(aten.logical_not.default, self._copies[mask.args[1]]), mask.args[0], low)
        if packet in {aten.contiguous, aten.clone, aten.to}:
            return self._allows(mask.args[0])
        if packet is aten.add and all(isinstance(item, fx.Node) for item in mask.args):
            hiding = [item for item in mask.args if not has_gradient(item)]
            return self._both(self._allows(hiding[0]), hiding[-1], low) if hiding else None
        return self._call(aten.gt.Scalar, self._copies[mask], low) if self.is_known(mask) else None

    def _both(self, one: fx.Node | None, other: Any, low: float) -> fx.Node | None:
        """What a condition allows and another mask does not hide; None where either is not known. A bias that is
        learned adds to a score, and hides nothing."""
        if not isinstance(other, fx.Node):
            return None if _is_low(other, low) else one
        if has_gradient(other):
            return one
        found = self._allows(other)
        return None if one is None or found is None else self._call(aten.logical_and.default, one, found)

    def finish(self, labels: Sequence[fx.Node], masks: Sequence[fx.Node | None]) -> fx.GraphModule:
        """The module that gives labels and masks. What a model checks of them, the graph checks that it is made for."""
        self._graph.output([*(self._copies.get(node) for node in labels), *masks])
        self._graph.eliminate_dead_code(lambda node: node.op in {"placeholder", "output"})
        return fx.GraphModule(self._owner, self._graph)


def _adds(step: fx.Node) -> bool:
    return getattr(step.target, "overloadpacket", None) in {aten.add, aten.add_}


def _puts_low(put: Any, low: float) -> bool:
    """Whether a number is low, or a tensor that holds one number."""
    is_made = isinstance(put, fx.Node) and put.target in {aten.full.default, aten.scalar_tensor.default}
    return _is_low(put.args[-1] if is_made else put, low)


def _is_low(value: Any, low: float) -> bool:
    return isinstance(value, int | float) and value <= low
