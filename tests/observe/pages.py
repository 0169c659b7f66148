"""Reading a page as a browser would: its headings, tables, plots and words, and whether it is whole and on its own."""

import re
from html.parser import HTMLParser
from types import SimpleNamespace

VOID = {"meta", "br"}
FROM_ELSEWHERE = {"src", "href", "srcset", "data", "action"}


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.headings, self.tables, self.plots, self.words = [], [], [], [], []
        self.ids, self.links = set(), []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        elsewhere = [value for name, value in attributes if name in FROM_ELSEWHERE and not value.startswith("#")]
        assert not elsewhere, f"<{tag}> loads something: {found}"
        self.ids.update({found["id"]} if "id" in found else ())
        self.links.extend(value[1:] for name, value in attributes if name == "href")
        assert tag not in ("script", "link", "iframe", "img")
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "svg" and found.get("class") == "plot":
            self.plots.append(SimpleNamespace(label=found["aria-label"], words=[], points=[], bars=[]))
        elif tag in ("polyline", "polygon"):
            points = [tuple(map(float, point.split(","))) for point in found["points"].split()]
            self.plots[-1].points.append(points)
        elif tag == "ul" and found.get("class") == "bars":
            self.plots.append(SimpleNamespace(label=found["aria-label"], words=[], points=[], bars=[]))
        elif tag == "i" and "li" in self.open:
            self.plots[-1].bars.append(float(re.match(r"width:([\d.]+)%", found["style"]).group(1)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        if "style" in self.open:
            assert not re.search(r"https?:|url\(|@import", data)
            return
        self.words.append(data)
        if self.open[-1:] == ["h2"]:
            self.headings.append(data)
        if self.plots and ("svg" in self.open or ("figure" in self.open and "ul" in self.open)):
            self.plots[-1].words.append(data)
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data


def read(html):
    """A page; one that is not well formed, or that would load anything, fails here."""
    assert html.startswith("<!DOCTYPE html>")
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    assert set(reader.links) <= reader.ids
    return SimpleNamespace(
        headings=reader.headings,
        tables=reader.tables,
        plots={plot.label: plot for plot in reader.plots},
        text=" ".join(" ".join(reader.words).split()),
    )


def table_with(page, *headings):
    """The first table with these headings, without them."""
    return next(rows[1:] for rows in page.tables if rows and rows[0][: len(headings)] == list(headings))
