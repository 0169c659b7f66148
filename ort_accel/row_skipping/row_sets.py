"""Which rows of a value are read: sets of rows, named by where they come from.

The rows of a value lie along some of its dimensions, mostly batch and length, in row-major order. A set of rows is a
union of atoms, each of which can be computed for every batch in front of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

import sympy
from torch import fx

Extent: TypeAlias = int | sympy.Expr


@dataclass(frozen=True)
class Labelled:
    """The rows whose label is not to be ignored."""

    target: fx.Node
    ignore_index: int


@dataclass(frozen=True)
class Place:
    """One place of a dimension."""

    index: int
    size: Extent


@dataclass(frozen=True)
class Listed:
    """One place of each sequence, as a tensor lists them."""

    index: fx.Node
    batch: Extent
    length: Extent


@dataclass(frozen=True)
class Marked:
    """The tokens for which not all that a tensor says is `hides`."""

    mark: fx.Node
    hides: bool


@dataclass(frozen=True)
class Keys:
    """The rows that the queries of an attention look at."""

    attention: fx.Node


@dataclass(frozen=True)
class Shifted:
    """A set over a slice of a dimension, seen from the whole."""

    inner: Atom
    axis: int
    start: Extent
    small: tuple[Extent, ...]
    large: tuple[Extent, ...]


@dataclass(frozen=True)
class Lifted:
    """A set over some of the axes, for every place of the others."""

    inner: Atom
    axes: tuple[int, ...]
    sizes: tuple[Extent, ...]


Atom = Labelled | Place | Listed | Marked | Keys | Shifted | Lifted


@dataclass(frozen=True)
class Everything:
    """All rows are read, and by what."""

    reader: str


@dataclass(frozen=True)
class Some:
    """Some rows are read: those of the atoms, along these dimensions of the value."""

    dims: tuple[int, ...]
    atoms: frozenset[Atom]


Demand = Everything | Some


def has_keys(atoms: Iterable[Atom]) -> bool:
    """Whether a set depends on what attention looks at."""
    return any(isinstance(atom, Keys) for atom in atoms)


def lift(demand: Some, dims: tuple[int, ...], sizes: tuple[Extent, ...]) -> Demand:
    """The same rows along more dimensions of the value, which are of these sizes."""
    if demand.dims == dims:
        return demand
    if has_keys(demand.atoms):
        return Everything("rows of attention that meet others along another dimension")
    axes = tuple(dims.index(dim) for dim in demand.dims)
    return Some(dims, frozenset(Lifted(atom, axes, sizes) for atom in demand.atoms))


def shift(demand: Some, axis: int, start: Extent, small: tuple[Extent, ...], large: tuple[Extent, ...]) -> Demand:
    """Rows of a slice, as rows of what it is taken from."""
    if has_keys(demand.atoms):
        return Everything("attention to a slice of the tokens")
    return Some(demand.dims, frozenset(Shifted(atom, axis, start, small, large) for atom in demand.atoms))


def join(demands: Iterable[Demand], shape: tuple[Extent, ...]) -> Demand:
    """What is read of a value by all of its readers together."""
    return reduce(lambda one, other: _join_two(one, other, shape), demands)


def _join_two(one: Demand, other: Demand, shape: tuple[Extent, ...]) -> Demand:
    if isinstance(one, Everything):
        return one
    if isinstance(other, Everything):
        return other
    dims = tuple(sorted({*one.dims, *other.dims}))
    sizes = tuple(shape[dim] for dim in dims)
    first, second = lift(one, dims, sizes), lift(other, dims, sizes)
    if isinstance(first, Everything) or isinstance(second, Everything):
        return first if isinstance(first, Everything) else second
    return Some(dims, first.atoms | second.atoms)
