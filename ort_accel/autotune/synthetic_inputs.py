"""Makes inputs to measure with: of the right sizes, dtypes and layouts, with numbers that any operator takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ort_accel.executor.program import Symbols
from ort_accel.graph.symbolic_sizes import SymbolSource, hint
from ort_accel.kernels.attention_packed import FULL
from ort_accel.kernels.packed_rows import ROW_OPERATORS


def synthetic_inputs(nodes: Sequence[fx.Node]) -> list[object]:
    """Returns a value like each node's. All row tables among them name the same rows."""
    tables = _RowTables(nodes).tensors()
    return [tables[node] if node in tables else synthetic_value(node.meta.get("val")) for node in nodes]


def synthetic_value(value: object) -> object:
    """Returns a value like this one, at the sizes that the graph was captured with.

    Floats are small and of both signs, so that they neither overflow nor vanish. Integers are 0: every table has row 0.
    """
    if not isinstance(value, Tensor):
        return hint(value) if isinstance(value, torch.SymInt) else value
    sizes, strides = [hint(size) for size in value.shape], [hint(stride) for stride in value.stride()]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if all(sizes) else 0
    return _numbers(extent, value.dtype, value.device).as_strided(sizes, strides)


def _numbers(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype.is_floating_point:
        return torch.empty(count, dtype=dtype, device=device).uniform_(-0.1, 0.1)
    return torch.full((count,), dtype == torch.bool, dtype=dtype, device=device)


class _RowTables:
    """Tables of the rows that count, for a batch in which every sequence has the same number of them at its start."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self._rows: list[tuple[fx.Node, fx.Node]] = []
        self._spans: list[tuple[fx.Node, fx.Node, fx.Node]] = []
        self._batch: dict[fx.Node, int] = {}
        """The number of sequences of each table of rows."""
        self._count: dict[fx.Node, int] = {}
        """The number of all rows of each table of rows, those included that do not count."""
        for reader in dict.fromkeys(reader for node in nodes for reader in node.users):
            if getattr(reader.target, "overloadpacket", None) in ROW_OPERATORS:
                self._note(_arguments(reader))

    def _note(self, given: dict[str, Any]) -> None:
        if "places" in given:
            self._rows.append((given["rows"], given["places"]))
            self._count[given["rows"]] = _length(given["places"])
            return
        queries, keys, spans = given["query_rows"], given["key_rows"], given["spans"]
        self._spans.append((spans, queries, keys))
        for dim, rows in (2, queries), (3, keys):
            self._batch[rows] = batch = _length(spans)
            for pairs in filter(None, (given["mask"], given["kept"])):
                samples, length = (hint(pairs.meta["val"].shape[at]) for at in (0, dim))
                self._count.setdefault(rows, (batch if samples == 1 else samples) * length)

    def tensors(self) -> dict[fx.Node, Tensor]:
        """Returns the value of each node that is a table."""
        tables: dict[fx.Node, Tensor] = {}
        for spans, queries, keys in self._spans:
            columns = [column for rows in (queries, keys) for column in (self._ends(rows)[:-1], self._ends(rows)[1:])]
            tables[spans] = torch.stack([*columns, torch.full_like(columns[0], FULL)], 1)
            tables |= {rows: self._listed(rows) for rows in (queries, keys)}
        for rows, places in self._rows:
            tables[rows] = listed = self._listed(rows)
            tables[places] = torch.full((_length(places),), -1).index_copy_(0, listed, torch.arange(len(listed)))
        return {node: table.to(node.meta["val"].device) for node, table in tables.items()}

    def _ends(self, rows: fx.Node) -> Tensor:
        """Returns where each sequence begins among the rows, and where the last one ends."""
        batch = self._batch.get(rows, 1)
        return torch.arange(batch + 1) * _length(rows) // batch

    def _listed(self, rows: fx.Node) -> Tensor:
        ends = self._ends(rows)
        counts = ends.diff()
        length = self._count.get(rows, 0) // len(counts) or int(counts.max())
        starts = torch.arange(len(counts)) * length - ends[:-1]
        return torch.arange(_length(rows)) + starts.repeat_interleave(counts)


def _arguments(node: fx.Node) -> dict[str, Any]:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def _length(node: fx.Node) -> int:
    return hint(node.meta["val"].shape[0])


def symbols_of(graph: fx.Graph) -> Symbols:
    """Returns the value that each symbol had when the graph was captured."""
    values = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    source, symbols = SymbolSource(), Symbols()
    for position, value in enumerate(values):
        source.learn(position, value)
    hinted = [_Hinted(value) if isinstance(value, Tensor) else synthetic_value(value) for value in values]
    source.read(hinted, symbols)
    return symbols


class _Hinted:
    """A tensor's sizes without memory."""

    def __init__(self, fake: Tensor) -> None:
        self.shape = [hint(size) for size in fake.shape]
