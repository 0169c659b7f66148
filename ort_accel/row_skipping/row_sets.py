"""Defines sets of rows symbolically: which rows of a value are read.

The rows of a value lie along some of its dimensions, mostly batch and length, in row-major order. A set of rows is a
union of atoms. `batch_row_tables` computes each atom for every batch before the graph runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

import sympy
from torch import fx

SizeExpression: TypeAlias = int | sympy.Expr


@dataclass(frozen=True)
class ValidLabel:
    """The rows whose label is not `ignore_index`."""

    target: fx.Node
    ignore_index: int


@dataclass(frozen=True)
class FixedPosition:
    """One position of a dimension."""

    index: int
    size: SizeExpression


@dataclass(frozen=True)
class IndexedPosition:
    """One position of each sequence, given by an index tensor."""

    index: fx.Node
    batch: SizeExpression
    length: SizeExpression


@dataclass(frozen=True)
class Unmasked:
    """The tokens that a mask does not hide; a token is hidden where all of its mask is `masked_value`."""

    mask: fx.Node
    masked_value: bool


@dataclass(frozen=True)
class AttendedKeys:
    """The keys that the needed queries of an attention attend to."""

    attention: fx.Node


@dataclass(frozen=True)
class FromSlice:
    """A set over a slice of a dimension, as rows of the sliced tensor."""

    inner: Atom
    axis: int
    start: SizeExpression
    slice_sizes: tuple[SizeExpression, ...]
    full_sizes: tuple[SizeExpression, ...]


@dataclass(frozen=True)
class Broadcast:
    """A set over some of the axes, repeated along the others."""

    inner: Atom
    axes: tuple[int, ...]
    sizes: tuple[SizeExpression, ...]


Atom = ValidLabel | FixedPosition | IndexedPosition | Unmasked | AttendedKeys | FromSlice | Broadcast


@dataclass(frozen=True)
class AllRows:
    """All rows are read; `reader` names the operator that does."""

    reader: str


@dataclass(frozen=True)
class SomeRows:
    """The rows of the atoms are read, along these dimensions of the value."""

    dims: tuple[int, ...]
    atoms: frozenset[Atom]


ReadRows = AllRows | SomeRows


def has_attended_keys(atoms: Iterable[Atom]) -> bool:
    """True if a set depends on which keys attention attends to."""
    return any(isinstance(atom, AttendedKeys) for atom in atoms)


def innermost(atom: Atom) -> Atom:
    """Returns an atom without slices and broadcasts around it."""
    return innermost(atom.inner) if isinstance(atom, FromSlice | Broadcast) else atom


def broadcast(rows: SomeRows, dims: tuple[int, ...], sizes: tuple[SizeExpression, ...]) -> ReadRows:
    """Returns the same rows along more dimensions of the value, which have these sizes."""
    if rows.dims == dims:
        return rows
    if has_attended_keys(rows.atoms):
        return AllRows("rows of attention that meet others along another dimension")
    axes = tuple(dims.index(dim) for dim in rows.dims)
    return SomeRows(dims, frozenset(Broadcast(atom, axes, sizes) for atom in rows.atoms))


def unslice(
    rows: SomeRows,
    axis: int,
    start: SizeExpression,
    slice_sizes: tuple[SizeExpression, ...],
    full_sizes: tuple[SizeExpression, ...],
) -> ReadRows:
    """Returns rows of a slice as rows of the sliced tensor."""
    if has_attended_keys(rows.atoms):
        return AllRows("attention to a slice of the tokens")
    return SomeRows(rows.dims, frozenset(FromSlice(atom, axis, start, slice_sizes, full_sizes) for atom in rows.atoms))


def union(reads: Iterable[ReadRows], shape: tuple[SizeExpression, ...]) -> ReadRows:
    """Returns the rows that several readers of a value read together."""
    return reduce(lambda one, other: _union_of_two(one, other, shape), reads)


def _union_of_two(one: ReadRows, other: ReadRows, shape: tuple[SizeExpression, ...]) -> ReadRows:
    if isinstance(one, AllRows):
        return one
    if isinstance(other, AllRows):
        return other
    dims = tuple(sorted({*one.dims, *other.dims}))
    sizes = tuple(shape[dim] for dim in dims)
    first, second = broadcast(one, dims, sizes), broadcast(other, dims, sizes)
    if isinstance(first, AllRows) or isinstance(second, AllRows):
        return first if isinstance(first, AllRows) else second
    return SomeRows(dims, first.atoms | second.atoms)
