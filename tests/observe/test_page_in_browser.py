"""The report's page in headless Chromium: its layout at three widths, and its colours in light and dark.

Without a Chromium these tests are skipped, with the command that installs one.
"""

import json
import os
import re
import shutil
import subprocess
from html import escape, unescape

import pytest

from ort_accel.observe.html_report import html_report
from ort_accel.reporting.report import Report
from tests.observe.test_html_report import MEMORY, QUESTIONS, RACES, measured_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")

SIZES = {380: 844, 768: 1024, 1280: 800}
"""The heights of a phone, a tablet and a laptop, by width."""
LEAST_TEXT_PX = 10
LEAST_CONTRAST = 4.5
"""That of WCAG 2.2, level AA."""

MEASURE = """
onload = () => {
  const inner = document.querySelector("iframe").contentDocument, view = inner.defaultView;
  const box = element => element.getBoundingClientRect();
  const colour = name => {
    const probe = inner.body.appendChild(inner.createElement("i"));
    probe.style.color = `var(--${name})`;
    const found = view.getComputedStyle(probe).color;
    probe.remove();
    return found;
  };
  inner.querySelectorAll("details").forEach(each => each.open = true);
  const fits = each => each.closest(".wide") || box(each).right <= view.innerWidth + 0.5;
  const found = {
    width: inner.documentElement.scrollWidth,
    headlines: [...inner.querySelectorAll(".answer")].map(each =>
      [each.querySelector("h2").textContent, box(each.querySelector("b")).bottom]),
    outside: [...inner.body.querySelectorAll("*")].filter(each => !fits(each)).map(each => each.outerHTML.slice(0, 99)),
    texts: [...inner.querySelectorAll("svg.plot text, p, td, li")].map(each => {
      const plot = each.closest("svg"), scale = plot ? box(plot).width / plot.viewBox.baseVal.width : 1;
      return parseFloat(view.getComputedStyle(each).fontSize) * scale;
    }),
    keys: [...inner.querySelectorAll("a, summary, .wide")].map(each => each.focus() || inner.activeElement === each),
    colours: Object.fromEntries(["page", "card", "ink", "quiet", "good", "warn"].map(name => [name, colour(name)])),
  };
  document.body.innerHTML = "<pre></pre>";
  document.body.firstChild.textContent = JSON.stringify(found);
};
"""


def layout(html, folder, width, dark=False):
    """A page as it is laid out in a frame of this width."""
    frame = f'<iframe width="{width}" height="{SIZES[width]}" style="border:0" srcdoc="{escape(html)}"></iframe>'
    (folder / "frame.html").write_text(f"<!DOCTYPE html><script>{MEASURE}</script><body>{frame}</body>")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", f"{folder / 'frame.html'}"]
    environment = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return json.loads(unescape(re.search(r"<body><pre>(.*)</pre>", done.stdout, re.DOTALL).group(1)))


def pages():
    full = {**measured_report().to_dict(), "memory": [MEMORY], "races": RACES}
    return {"full": html_report(full), "empty": html_report(Report().to_dict())}


@pytest.mark.parametrize("kind", ["full", "empty"])
@pytest.mark.parametrize("width", SIZES)
def test_the_answers_are_on_the_first_screen_and_nothing_scrolls_sideways(tmp_path, kind, width):
    found = layout(pages()[kind], tmp_path, width)
    assert found["width"] <= width
    assert found["outside"] == []
    assert [question for question, _ in found["headlines"]] == QUESTIONS
    assert all(bottom <= SIZES[width] for _, bottom in found["headlines"])
    assert min(found["texts"]) >= LEAST_TEXT_PX
    assert all(found["keys"])


@pytest.mark.parametrize("dark", [False, True])
def test_words_stand_out_from_their_background_in_light_and_in_dark(tmp_path, dark):
    colours = {
        name: brightness(colour) for name, colour in layout(pages()["empty"], tmp_path, 768, dark)["colours"].items()
    }
    assert (colours["ink"] > colours["page"]) is dark
    for name in ("ink", "quiet", "good", "warn"):
        for ground in ("page", "card"):
            low, high = sorted((colours[name], colours[ground]))
            assert (high + 0.05) / (low + 0.05) >= LEAST_CONTRAST, f"{name} on {ground}"


def brightness(colour):
    """The relative luminance of a colour such as `rgb(1, 2, 3)`."""
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels(colour)]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def channels(colour):
    return [int(number) / 255 for number in re.fullmatch(r"rgb\((\d+), (\d+), (\d+)\)", colour).groups()]
