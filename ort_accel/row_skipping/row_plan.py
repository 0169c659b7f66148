"""The few sets of rows that a smaller graph works on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from torch import fx

from ort_accel.graph.symbolic_sizes import expression
from ort_accel.row_skipping.attention_padding import Attention
from ort_accel.row_skipping.row_demand import Demands
from ort_accel.row_skipping.row_flow import value_of
from ort_accel.row_skipping.row_sets import Atom, Extent, Keys, Labelled, Lifted, Shifted, has_keys


@dataclass(frozen=True)
class RowSet:
    """A set of rows that parts of the graph are computed for."""

    number: int
    atoms: frozenset[Atom]
    is_core: bool
    """Whether it holds all that attention reaches from it, over all layers."""
    count: Extent
    """How many rows there are in all."""


@dataclass
class Plan:
    """Which values are computed for which set of rows."""

    demands: Demands
    sets: list[RowSet] = field(default_factory=list)
    set_of: dict[fx.Node, RowSet] = field(default_factory=dict)
    runs: list[tuple[Attention, RowSet, RowSet]] = field(default_factory=list)
    """Attention that runs sequence by sequence, with the sets of its queries and keys; equal ones are one."""

    @cached_property
    def reads_labels(self) -> bool:
        """Whether ignored labels are left out."""
        return bool(self.demands.losses)

    @cached_property
    def cores(self) -> list[RowSet]:
        """The sets that attention reaches."""
        return [item for item in self.sets if item.is_core]

    def core_of(self, attention: Attention) -> RowSet | None:
        """The set that the keys of an attention are in; None where all keys are read."""
        return next((item for item in self.cores if Keys(attention.node) in item.atoms), None)


def make_plan(demands: Demands) -> Plan:
    """Give each value its set. All that attention reaches, over all layers, is one set."""
    plan = Plan(demands)
    groups = _Groups(some.atoms for node in demands.of if (some := demands.rows(node)) and has_keys(some.atoms))
    known: dict[tuple[frozenset[Atom], bool, Extent], RowSet] = {}
    for node in demands.of:
        some = demands.rows(node)
        if some is None:
            continue
        is_core = has_keys(some.atoms)
        atoms = groups.of(some.atoms) if is_core else some.atoms
        count = expression(prod(value_of(node).shape[dim] for dim in some.dims))
        key = atoms, is_core, count
        if key not in known:
            known[key] = RowSet(len(plan.sets), atoms, is_core, count)
            plan.sets.append(known[key])
        plan.set_of[node] = known[key]
    _plan_runs(plan)
    return plan


def _plan_runs(plan: Plan) -> None:
    for node, attention in plan.demands.attentions.items():
        keys = plan.core_of(attention)
        if keys and attention.can_run_by_sequence:
            plan.runs.append((attention, plan.set_of[node], keys))


class _Groups:
    """Joins sets of atoms that have an atom in common."""

    def __init__(self, sets: Iterable[frozenset[Atom]]) -> None:
        self._groups: list[frozenset[Atom]] = []
        for atoms in sets:
            meets = [group for group in self._groups if group & atoms]
            self._groups = [group for group in self._groups if not group & atoms]
            self._groups.append(atoms.union(*meets))

    def of(self, atoms: frozenset[Atom]) -> frozenset[Atom]:
        return next(group for group in self._groups if group & atoms)


def has_labels(atom: Atom) -> bool:
    """Whether labels decide on an atom."""
    return isinstance(atom, Labelled) or (isinstance(atom, Shifted | Lifted) and has_labels(atom.inner))
