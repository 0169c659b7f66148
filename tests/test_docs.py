"""The README and the guides: links lead somewhere, configurations load, and files, keys and commands exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from ort_accel.cli.main import app
from ort_accel.config.fields import all_keys

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
GUIDES = [README, *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*GUIDES, *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"))]

KEYS = {".".join(path) for path in all_keys()}
SECTIONS = {key.partition(".")[0] for key in KEYS}
KEYS |= {key.rpartition(".")[0] for key in KEYS}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
each_guide = pytest.mark.parametrize("page", GUIDES, ids=name_of)


def snippets(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """A page without its snippets."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The files that a page links to, with the anchor."""
    for link in re.findall(r'\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)"', prose(page)):
        file, _, anchor = "".join(link).partition("#")
        if not file.startswith("http"):
            yield (page.parent / file if file else page), anchor


@each_page
def test_every_link_leads_to_a_file_and_to_a_heading(page: Path) -> None:
    found = list(links(page))
    assert [str(file) for file, _ in found if not file.exists()] == []
    assert [(str(file), anchor) for file, anchor in found if anchor and anchor not in anchors(file)] == []


@each_guide
def test_every_configuration_passes_the_check(page: Path, tmp_path: Path) -> None:
    for text in snippets(page, "yaml"):
        (tmp_path / "x.yaml").write_text(text, encoding="utf-8")
        result = CliRunner().invoke(app, ["check", str(tmp_path / "x.yaml")])
        assert result.exit_code == 0, f"{text}\n{result.output}"


@each_guide
def test_the_keys_and_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:\w+\.)+\w+)(?::[^`]*)?`", prose(page))
    assert [key for key in named if key.partition(".")[0] in SECTIONS and key not in KEYS | {"engine.py"}] == []
    text = page.read_text(encoding="utf-8")
    files = re.findall(r"\b(?:examples|benchmarks|configs|tests)/[\w./-]*\w\.(?:py|yaml|json)\b", text)
    assert [name for name in files if not (ROOT / name).exists()] == []


@each_guide
def test_the_commands_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert set(re.findall(r"ort-accel (\w[\w-]*)", text)) <= set(commands)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= targets


def test_the_readme_has_no_long_table() -> None:
    tables = re.findall(r"(?:^\|.*\n)+", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert tables
    assert [table for table in tables if table.count("\n") > 2 + 6] == []


def test_each_benchmark_has_a_line() -> None:
    scripts = {path for path in (ROOT / "benchmarks").rglob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    listed = re.findall(
        r"^\| `([\w/]+\.py)` \|", (ROOT / "benchmarks/README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {str(path.relative_to(ROOT / "benchmarks")) for path in scripts} == set(listed)
