"""`extends: other.yaml`: it is followed from file to file, and each file is laid on the one that it names."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from ort_accel.config.tree import Node, merge, shortened, value_at, without
from ort_accel.config.wording import EXTENDS
from ort_accel.config.yaml_file import parse, read_file
from ort_accel.errors import Problem


@dataclass
class Chain:
    """A configuration and the files it extends, itself first."""

    trees: list[Node] = field(default_factory=list)
    """The tree of each file that is readable, without `extends`."""
    problems: list[Problem] = field(default_factory=list)
    complete: bool = True
    """True if all of them could be read."""

    def merged(self) -> Node:
        """Returns the trees as one: each is laid on those that it extends."""
        result = self.trees[-1]
        for tree in reversed(self.trees[:-1]):
            result = merge(result, tree)
        return result


def follow(tree: Node, name: str, folder: Path, file: Path | None = None) -> Chain:
    """Read what a configuration extends, to the end. A relative name is taken from `folder` for the first one, and from
    the file that names it for all others."""
    chain = Chain()
    names = [name]
    seen = {os.path.realpath(file)} if file else set()
    current: Node | None = tree
    while current is not None:
        chain.trees.append(without(current, (EXTENDS,)))
        link = value_at(current, (EXTENDS,))
        current = None
        if link is None:
            break
        base, reason = _base_of(link, folder, names, seen)
        content, unreadable = read_file(base, str(base), apart_from=seen) if base else (None, reason)
        if base is not None and content is None:
            unreadable = f"{shortened(str(base))!r}: {unreadable}"
        if base is None or content is None:
            chain.problems.append(link.position.problem((EXTENDS,), unreadable))
            chain.complete = False
            break
        current, problems = parse(content, str(base))
        chain.problems += problems
        chain.complete = current is not None
        folder = base.parent
    return chain


def _base_of(link: Node, folder: Path, names: list[str], seen: set[str]) -> tuple[Path | None, str]:
    """Returns the file that a link names, or the reason why it cannot be used. Adds it to `names` and `seen`."""
    if not isinstance(link.value, str) or not link.value.strip() or "\0" in link.value:
        return None, "this must be the path of one YAML file, as text; allowed: a path"
    base = folder / link.value
    names.append(str(base))
    real = os.path.realpath(base)
    if real in seen:
        return None, f"the files extend each other in a circle: {' -> '.join(names)}; remove one of the links"
    seen.add(real)
    return base, ""
