"""The site of the guides: no broken link, nothing of another host, and a search that works without a server."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.observe.test_page_in_browser import CHROMIUM

pytest.importorskip("material", reason="mkdocs-material is not installed: pip install '.[dev]'")

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_guide_has_its_page_and_nothing_is_loaded_from_elsewhere(site):
    guides = {guide.stem for guide in (ROOT / "docs").glob("*.md")} | {
        "start",
        "contributing",
        "changelog",
        "benchmarks",
    }
    pages = {page.stem: page.read_text(encoding="utf-8") for page in site.glob("*.html")}
    assert guides <= set(pages)
    for name, html in pages.items():
        loaded = re.findall(r'<(?:script|img|iframe|source|link)\b[^>]*?(?:src|href|srcset)="?(https?:[^"\s>]+)', html)
        assert loaded == [], name


def test_links_out_of_the_guides_lead_to_pages_of_the_site(site):
    index, configuration = ((site / f"{name}.html").read_text(encoding="utf-8") for name in ("index", "configuration"))
    assert 'href="start.html"' in index
    assert 'href="contributing.html"' in index
    assert 'href="configs/default.yaml"' in configuration
    assert (site / "configs" / "default.yaml").read_bytes() == (ROOT / "configs" / "default.yaml").read_bytes()


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
def test_the_search_finds_pages_that_are_opened_as_files(site, tmp_path):
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=20000", "--dump-dom", f"file://{site}/index.html?q=budget"]
    environment = {**os.environ, "HOME": str(tmp_path)}
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    assert re.search(r"\d+ matching documents", found)
    assert 'memory.html" class="md-search-result__link"' in found
