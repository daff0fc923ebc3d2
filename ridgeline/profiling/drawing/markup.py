"""HTML and SVG that cannot be broken by what is put into it: text is escaped unless it is Markup.

element("p", "a < b", class_="note")        # <p class="note">a &lt; b</p>
element("circle", cx="40%", cy=12, r=5)     # <circle cx="40%" cy="12" r="5"></circle>
"""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup, escape

__all__ = ["Markup", "element", "join"]

VOID = {"br", "hr", "img", "meta", "col", "wbr"}  # elements of HTML that have no end


def element(name: str, *children: object, **attributes: object) -> Markup:
    """Children that are not Markup are text. In attributes `_` is written as `-`, one at the end is
    dropped (`class_`), None and False leave the attribute out, True gives it no value.
    """
    own = join(_attribute(key, value) for key, value in attributes.items())
    start = Markup("<{}{}>").format(Markup(name), own)
    if name in VOID:
        return start
    return start + join(children) + Markup("</{}>").format(Markup(name))


def join(children: Iterable[object]) -> Markup:
    """One after the other, each escaped unless it is Markup; None is nothing."""
    return Markup("").join(escape(child) for child in children if child is not None)


def _attribute(name: str, value: object) -> Markup:
    if value is None or value is False:
        return Markup("")
    name = name.rstrip("_").replace("_", "-")
    if value is True:
        return Markup(" {}").format(Markup(name))
    return Markup(' {}="{}"').format(Markup(name), value)
