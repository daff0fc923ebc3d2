"""A page in one file: style, script and icon are inside, nothing is fetched, and a policy in it
forbids what is not ours to run.

    text = page("Profile of demo", "demo", "Profile", "Decode is bound by …", sections)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.profiling.drawing.markup import Markup


@dataclass(frozen=True)
class Section:
    key: str  # its anchor: letters and dashes
    title: str
    body: Markup
    intro: Markup | str = ""  # a sentence below the title


def page(
    title: str,  # of the window
    about: Markup | str,  # beside the brand: what it is of
    eyebrow: str,  # a few words above the headline
    headline: str,  # what there is to know, in a sentence
    sections: Sequence[Section],
    *,
    lead: Markup | str = "",  # below the headline
    footer: Markup | str = "",
) -> str:
    """The whole document, with a link to each section. Readable without JavaScript."""
    raise NotImplementedError
