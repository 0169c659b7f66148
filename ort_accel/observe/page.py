"""HTML pages without network and scripts, for light and dark displays.

Text is escaped unless it is `Markup` already, so that no name of a module or an operator can break a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

COLOURS = 6
"""The number of colours, which the page's style defines as `--c0` and so on."""

_STYLE = Path(__file__).with_name("page.css")


class Markup(str):
    """Text that is HTML, and is not escaped again."""

    __slots__ = ()


Content = str | Iterable[str]
"""Text, markup, or several of either."""


def tag(name: str, *contents: Content, **attributes: object) -> Markup:
    """Returns an element. Attributes lose a trailing underscore and write others as hyphens; None leaves one out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{joined(*contents)}</{name}>")


def joined(*contents: Content) -> Markup:
    """Concatenate contents."""
    parts = (part for content in contents for part in ([content] if isinstance(content, str) else content))
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def table(headings: Sequence[str], rows: Iterable[Sequence[Content]], numbers: Iterable[int] = ()) -> Markup:
    """Returns a table; the columns in `numbers` are aligned to the right."""
    right = set(numbers)

    def cells(kind: str, row: Sequence[Content]) -> list[Markup]:
        return [tag(kind, cell, class_="number" if place in right else None) for place, cell in enumerate(row)]

    head = tag("thead", tag("tr", cells("th", headings)))
    body = tag("tbody", (tag("tr", cells("td", row)) for row in rows))
    return tag("div", tag("table", head, body), class_="wide")


def folded(summary: str, *contents: Content) -> Markup:
    """Returns contents that are shown on a click."""
    return tag("details", tag("summary", summary), *contents)


def figures(values: Iterable[tuple[str, str]]) -> Markup:
    """Returns the key figures at the top of a page, each with its name."""
    boxes = (tag("div", tag("b", value), tag("span", what)) for what, value in values)
    return tag("div", boxes, class_="figures")


def page(title: str, subtitle: str, *contents: Content) -> str:
    """Returns the whole page."""
    head = tag(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", title),
        tag("style", Markup(_STYLE.read_text(encoding="utf-8"))),
    )
    body = tag("body", tag("main", tag("h1", title), tag("p", subtitle, class_="quiet"), *contents))
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"
