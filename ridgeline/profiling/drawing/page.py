"""A page in one file: style, script and icon are inside, nothing is fetched, and a policy in it
forbids what is not ours to run.

    text = page("Profile of demo", "demo", "Profile", "Decode is bound by …", sections)
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined, Template

from ridgeline.profiling.drawing.markup import Markup

FOLDER = Path(__file__).parent
# The server's page has these two as well.
PALETTE = FOLDER / "palette.css"
THEME = FOLDER / "theme.js"
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">'
    '<rect width="32" height="32" rx="7" fill="#1f4e96"/>'
    '<path d="M5 24 15 11h12" fill="none" stroke="#fff" stroke-width="3" stroke-linecap="round"/>'
    '<circle cx="11" cy="16.2" r="3" fill="#ffc27a"/></svg>'
)


@dataclass(frozen=True)
class Section:
    key: str  # its anchor: letters and dashes
    title: str
    body: Markup
    intro: Markup | str = ""  # a sentence below the title


def page(
    title: str,  # of the window
    subject: Markup | str,  # beside the brand: the model or file that it shows
    eyebrow: str,  # a few words above the headline
    headline: str,  # what there is to know, in a sentence
    sections: Sequence[Section],
    *,
    lead: Markup | str = "",  # below the headline
    footer: Markup | str = "",
) -> str:
    """The whole document, with a link to each section. Readable without JavaScript."""
    assert all(re.fullmatch(r"[a-z-]+", each.key) for each in sections), "anchors are plain words"
    script = _text(THEME) + _text(FOLDER / "page.js")
    return _template().render(
        title=title,
        subject=subject,
        eyebrow=eyebrow,
        headline=headline,
        sections=sections,
        lead=lead,
        footer=footer,
        policy=_policy(script),
        icon="data:image/svg+xml," + quote(ICON),
        style=Markup(_text(PALETTE) + _text(FOLDER / "style.css")),
        script=Markup(script),
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Only this script, by its hash; nothing from anywhere else."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src 'sha256-{digest}'",
            "style-src 'unsafe-inline'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(_text(FOLDER / "page.html"))
