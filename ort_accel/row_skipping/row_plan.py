"""Turns the analysis into a few numbered row sets, and gives each value its set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from torch import fx

from ort_accel.graph.symbolic_sizes import expression
from ort_accel.row_skipping.attention_match import Attention
from ort_accel.row_skipping.row_demand import RowAnalysis
from ort_accel.row_skipping.row_flow import value_of
from ort_accel.row_skipping.row_sets import Atom, AttendedKeys, SizeExpression, has_attended_keys


@dataclass(frozen=True)
class RowSet:
    """A set of rows that parts of the graph are computed for."""

    number: int
    atoms: frozenset[Atom]
    is_attended: bool
    """True if the set holds all keys that attention reaches from it, over all layers."""
    count: SizeExpression
    """The number of rows in the unpacked value."""


@dataclass
class RowPlan:
    """Tells which values are computed for which set of rows."""

    demands: RowAnalysis
    sets: list[RowSet] = field(default_factory=list)
    set_of: dict[fx.Node, RowSet] = field(default_factory=dict)
    runs: list[tuple[Attention, RowSet, RowSet]] = field(default_factory=list)
    """Attention that runs as varlen attention, with the row sets of its queries and keys."""

    @cached_property
    def attended_sets(self) -> list[RowSet]:
        """The sets that attention reaches."""
        return [item for item in self.sets if item.is_attended]

    def key_set(self, attention: Attention) -> RowSet | None:
        """Returns the set of an attention's keys; None where all keys are read."""
        return next((item for item in self.attended_sets if AttendedKeys(attention.node) in item.atoms), None)


def make_plan(demands: RowAnalysis) -> RowPlan:
    """Returns a plan in which all rows that attention reaches, over all layers, are one set."""
    plan = RowPlan(demands)
    by_node = {node: rows for node in demands.of if (rows := demands.rows(node))}
    groups = _Groups(rows.atoms for rows in by_node.values() if has_attended_keys(rows.atoms))
    known: dict[tuple[frozenset[Atom], bool, SizeExpression], RowSet] = {}
    for node, rows in by_node.items():
        is_attended = has_attended_keys(rows.atoms)
        atoms = groups.group_of(rows.atoms) if is_attended else rows.atoms
        count = expression(prod(value_of(node).shape[dim] for dim in rows.dims))
        key = atoms, is_attended, count
        if key not in known:
            known[key] = RowSet(len(plan.sets), atoms, is_attended, count)
            plan.sets.append(known[key])
        plan.set_of[node] = known[key]
    for node, attention in demands.attentions.items():
        keys = plan.key_set(attention)
        if keys and attention.can_run_varlen:
            plan.runs.append((attention, plan.set_of[node], keys))
    return plan


class _Groups:
    """Merges sets of atoms that have an atom in common."""

    def __init__(self, sets: Iterable[frozenset[Atom]]) -> None:
        self._groups: list[frozenset[Atom]] = []
        for atoms in sets:
            overlapping = [group for group in self._groups if group & atoms]
            self._groups = [group for group in self._groups if not group & atoms]
            self._groups.append(atoms.union(*overlapping))

    def group_of(self, atoms: frozenset[Atom]) -> frozenset[Atom]:
        return next(group for group in self._groups if group & atoms)
