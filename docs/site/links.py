"""Checks the built site: every link, picture, script and style that is not elsewhere leads to a
file, every anchor to an element. MkDocs checks what is written in Markdown; this looks at what came
out.

python docs/site/links.py build/site
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ELSEWHERE = ("http", "https", "mailto", "data", "javascript")


class SitePage(HTMLParser):
    """What a page links to, and the anchors it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []  # without being followed: scripts, styles, pictures
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        own = {name: value or "" for name, value in attributes}
        self.anchors |= {own[name] for name in ("id", "name") if name in own}
        if tag == "a" and own.get("href"):
            self.targets.append(own["href"])
        for name in ("src", "href"):
            if tag in ("img", "script", "link") and own.get(name) and own.get("rel") != "canonical":
                self.loaded.append(own[name])


def wrong_links(folder: Path) -> Iterator[str]:
    pages = {path.resolve(): SitePage(path) for path in folder.rglob("*.html")}
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are for the place where it is shown
        for target in [*page.targets, *page.loaded]:
            parts = urlsplit(target)
            if parts.scheme in ELSEWHERE or parts.netloc:
                if target in page.loaded:
                    yield f"{path.name}: {target} needs a network"
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            file = file / "index.html" if file.is_dir() else file
            if not file.exists():
                yield f"{path.name}: {target} is not there"
            elif parts.fragment and file in pages:
                anchor = unquote(parts.fragment)
                if anchor not in pages[file].anchors and not anchor.startswith("__"):
                    yield f"{path.name}: {target} has no such place"


def main(folder: Path) -> int:
    wrong = sorted(set(wrong_links(folder)))
    for line in wrong:
        print(line)
    num_pages = sum(1 for _ in folder.rglob("*.html"))
    print(f"{num_pages} pages, {len(wrong)} wrong links")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
