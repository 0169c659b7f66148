"""Hooks of mkdocs: pages that stand outside docs/ are part of the site, and links lead to their place in it."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "start.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Pages outside of docs/, with their names in the site."""
LINK = re.compile(r'(\]\(|srcset="|src=")(?!https?:)([^)\s"#]+)')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of docs/, and the configurations that pages link to."""
    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=moved(text, posixpath.dirname(source))))
    for file in (ROOT / "configs").rglob("*.yaml"):
        name = file.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Turn the links of a guide that lead out of docs/."""
    return markdown if page.file.src_uri in PAGES.values() else moved(markdown, "docs")


def moved(markdown: str, folder: str) -> str:
    """Returns the text of a page in a folder of the repository, with its links as they are in the site."""

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        if (ROOT / target).is_dir():
            target = min(file.relative_to(ROOT).as_posix() for file in (ROOT / target).iterdir())
        return match[1] + PAGES.get(target, target.removeprefix("docs/"))

    return LINK.sub(link, markdown)
