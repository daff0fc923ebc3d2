"""What tests ask of an HTML document: its elements, and whether every one that begins ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"br", "hr", "img", "meta", "col", "wbr", "link", "input"}


@dataclass
class Node:
    name: str
    attributes: dict[str, str]
    content: list[Node | str] = field(default_factory=list)

    @property
    def children(self) -> list[Node]:
        return [each for each in self.content if isinstance(each, Node)]

    @property
    def raw(self) -> str:
        return "".join(each if isinstance(each, str) else each.raw for each in self.content)

    @property
    def text(self) -> str:
        """With single spaces, as it is read."""
        return " ".join(self.raw.split())

    def all(self, name: str = "", look: str = "") -> list[Node]:
        """Below this one, of a name and a class where given."""
        found = []
        for child in self.children:
            classes = child.attributes.get("class", "").split()
            if (not name or child.name == name) and (not look or look in classes):
                found.append(child)
            found += child.all(name, look)
        return found

    def one(self, name: str = "", look: str = "") -> Node:
        (found,) = self.all(name, look)
        return found


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Node("", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {key: value or "" for key, value in attrs})
        assert len(node.attributes) == len(attrs), f"{tag} has an attribute twice: {attrs}"
        self.open[-1].content.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].content.append(Node(tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].name == tag, f"</{tag}> inside <{self.open[-1].name}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].content.append(data)


def tree(html: str) -> Node:
    """AssertionError for an element that does not end where it should."""
    parser = _Parser()
    parser.feed(html)
    parser.close()
    assert len(parser.open) == 1, f"<{parser.open[-1].name}> does not end"
    return parser.open[0]
