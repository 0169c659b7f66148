"""A room imports only rooms below it, files of a room do not import in a circle, and the ground floor is light."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

HOUSE = Path(__file__).parent.parent / "ort_accel"

FLOORS = [
    {"errors", "files"},
    {"reporting"},
    {"config", "observe"},
    {"memory", "native"},
    {"runtime"},
    {"graph"},
    {"kernels"},
    {"operators"},
    {"lowering", "row_skipping"},
    {"passes"},
    {"partition"},
    {"executor"},
    {"autotune", "recompute"},
    {"capture"},
    {"graph_cache"},
    {"eager", "generated"},
    {"compiler"},
    {"engine"},
    {"zero3"},
    {"subscribers", "optim", "data"},
    {"hf"},
    {"run"},
    {"cli"},
]
"""From the ground up. Rooms of one floor do not import each other."""

NO_ENGINE = {"optim", "data"}
"""Rooms that work without ONNX Runtime: they import the three lowest floors only."""

LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}


def room_of(module: str) -> str | None:
    """`ort_accel.config.load` is in the room `config`; the package itself is in none."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "ort_accel" else None


def imports(path: Path) -> set[str]:
    """The rooms that a file imports, at its top or anywhere inside."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are written in full here"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {room for room in map(room_of, found) if room in LEVEL}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(HOUSE.parent).with_suffix("").parts).removesuffix(".__init__")


def neighbours(room: Path) -> dict[str, set[str]]:
    """Each module of a room with those of the room that it imports: at its top, in functions, or by `import_module`."""
    modules = {module_of(path) for path in room.rglob("*.py")}
    found = {}
    for path in room.rglob("*.py"):
        named = set()
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import():
                    named |= {alias.name for alias in node.names}
                case ast.ImportFrom():
                    full = [f"{node.module}.{alias.name}" for alias in node.names]
                    named |= {name if name in modules else node.module for name in full}
                case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=name)]):
                    named.add(name)
        found[module_of(path)] = (named & modules) - {module_of(path)}
    return found


def files() -> list[Path]:
    return [path for path in HOUSE.rglob("*.py") if path.parent != HOUSE or path.stem in LEVEL]


def own_room(path: Path) -> str:
    return path.relative_to(HOUSE).parts[0].removesuffix(".py")


def test_every_room_has_a_floor():
    rooms = {own_room(path) for path in HOUSE.rglob("*.py")} - {"__init__", "__main__"}
    assert rooms <= set(LEVEL)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(HOUSE)))
def test_a_room_imports_only_rooms_below(path):
    room = own_room(path)
    allowed = {other for other, level in LEVEL.items() if level < LEVEL[room]} | {room}
    if room in NO_ENGINE:
        allowed = FLOORS[0] | FLOORS[1] | FLOORS[2] | {room}
    above = imports(path) - allowed
    assert not above, f"{path.relative_to(HOUSE)} imports {', '.join(sorted(above))}, which stands above {room}"


@pytest.mark.parametrize("room", sorted(path for path in HOUSE.iterdir() if path.is_dir()), ids=lambda path: path.name)
def test_files_of_one_room_do_not_import_in_a_circle(room):
    sorter = TopologicalSorter(neighbours(room))
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("module", ["ort_accel", "ort_accel.config", "ort_accel.hf", "ort_accel.cli.main"])
def test_the_entrance_is_light(module):
    code = f"""
import sys
import {module}
heavy = [name for name in ("torch", "onnxruntime", "transformers", "onnx") if name in sys.modules]
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HOUSE.parent)
    assert done.returncode == 0, done.stderr
