"""A source distribution can build the native library, and the package can be had without it."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import ort_accel

pytest.importorskip("scikit_build_core")

ROOT = Path(ort_accel.__file__).parents[1]
NATIVE = "ort_accel/native"


def built(kind: str, where: Path, settings: dict[str, str] | None = None, **variables: str) -> Path:
    """Returns the file that the build backend makes."""
    code = f"from scikit_build_core import build; build.build_{kind}({str(where)!r}, {settings or {}!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | variables, check=True, capture_output=True)
    [found] = where.iterdir()
    return found


def test_the_changelog_and_the_citation_have_the_version_of_the_package():
    assert f"\n## {ort_accel.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {ort_accel.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


def has_sources(found: set[str]) -> bool:
    return any(name.startswith(NATIVE) and name.endswith((".cc", ".h", "CMakeLists.txt")) for name in found)


def test_a_source_distribution_has_what_builds_the_library_and_not_the_library(tmp_path):
    made = built("sdist", tmp_path)
    assert made.name == f"ort_accel-{ort_accel.__version__}.tar.gz"
    with tarfile.open(made) as file:
        found = {name.partition("/")[2] for name in file.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / NATIVE).rglob("*") if path.suffix in {".cc", ".h"}}
    assert found >= sources | {f"{NATIVE}/CMakeLists.txt", "cmake/CMakeLists.txt", "pyproject.toml", "LICENSE"}
    assert found >= {"configs/default.yaml", "tests/test_packaging.py", "README.md"}
    assert not [name for name in found if name.endswith((".so", ".pyc")) or name.startswith("build")]


def test_without_a_compiler_the_package_is_built_without_the_library(tmp_path):
    made = built("wheel", tmp_path, CXX="/bin/false")
    assert made.name == f"ort_accel-{ort_accel.__version__}-py3-none-any.whl"
    found = names(made)
    assert f"{NATIVE}/library.py" in found
    assert f"{NATIVE}/libort_accel.so" not in found
    assert not has_sources(found)


@pytest.mark.long
def test_with_a_compiler_one_wheel_is_for_every_python(tmp_path):
    made = built("wheel", tmp_path)
    assert made.name.startswith(f"ort_accel-{ort_accel.__version__}-py3-none-linux_")
    found = names(made)
    assert f"{NATIVE}/libort_accel.so" in found
    assert not has_sources(found)


def test_an_editable_installation_is_a_path_that_others_may_precede(tmp_path):
    made = built("editable", tmp_path, {"wheel.cmake": "false"})
    assert not [name for name in names(made) if name.startswith("ort_accel/")]
    with zipfile.ZipFile(made) as file:
        assert str(ROOT) in file.read("_editable_skbc_ort_accel.pth").decode().splitlines()
    other = tmp_path / "ort_accel/__init__.py"
    other.parent.mkdir()
    other.touch()
    code = "import ort_accel; print(ort_accel.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}
    )
    assert done.stdout.strip() == str(other)
