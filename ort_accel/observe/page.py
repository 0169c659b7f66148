"""HTML pages without network and scripts, for light and dark displays.

Text is escaped unless it is `Markup` already, so that no name of a module or an operator can break a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

COLOURS = 6
"""The number of colours, which the page's style defines as `--c0` and so on."""

_VOID = {"br"}
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
    return Markup(f"<{name}{written}>" if name in _VOID else f"<{name}{written}>{joined(*contents)}</{name}>")


def joined(*contents: Content) -> Markup:
    """Concatenate contents."""
    parts = (part for content in contents for part in ([content] if isinstance(content, str) else content))
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def table(headings: Sequence[str], rows: Iterable[Sequence[Content]], numbers: Iterable[int] = ()) -> Markup:
    """Returns a table; the columns in `numbers` are aligned to the right. A wide one scrolls, also by keys."""
    right = set(numbers)

    def cells(kind: str, row: Sequence[Content], scope: str | None = None) -> list[Markup]:
        classes = ["number" if place in right else None for place in range(len(row))]
        return [tag(kind, cell, class_=name, scope=scope) for cell, name in zip(row, classes, strict=True)]

    head = tag("thead", tag("tr", cells("th", headings, "col")))
    body = tag("tbody", (tag("tr", cells("td", row)) for row in rows))
    named = ", ".join(filter(None, headings)) or "table"
    return tag("div", tag("table", head, body), class_="wide", role="region", aria_label=named, tabindex=0)


def folded(summary: str, *contents: Content) -> Markup:
    """Returns contents that are shown on a click."""
    return tag("details", tag("summary", summary), *contents)


def plots(*contents: Content) -> Markup:
    """Returns plots side by side, as far as there is room."""
    return tag("div", *contents, class_="plots")


def figures(values: Iterable[tuple[str, str]]) -> Markup:
    """Returns the key figures at the top of a page, each with its name."""
    boxes = (tag("div", tag("b", value), tag("span", what)) for what, value in values)
    return tag("div", boxes, class_="figures")


def sections(parts: Iterable[tuple[str, Content]]) -> Markup:
    """Returns titled sections, and before them a list of links to them."""
    named = [(title, f"section-{number}", content) for number, (title, content) in enumerate(parts, 1)]
    links = (tag("a", title, href=f"#{anchor}") for title, anchor, _ in named)
    listed = tag("nav", links, aria_label="sections")
    return joined(listed, (tag("section", tag("h2", title), content, id=anchor) for title, anchor, content in named))


def style() -> Markup:
    """Returns the style of all content, which holds within elements of the class `ort-accel`."""
    return tag("style", Markup(_STYLE.read_text(encoding="utf-8")))


def fragment(*contents: Content) -> Markup:
    """Returns contents with their style, for a place within another page, such as a notebook."""
    return tag("div", style(), *contents, class_="ort-accel")


def page(title: str, subtitle: str, *contents: Content) -> str:
    """Returns the whole page."""
    head = tag(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", title),
        style(),
    )
    main = tag("main", tag("h1", title), tag("p", subtitle, class_="quiet"), *contents)
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', main, class_='ort-accel'), lang='en')}\n"
