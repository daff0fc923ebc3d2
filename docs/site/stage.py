"""Lays the site's sources out: the documents under the names of their pages, links led to where
their targets are there, pages of the API and of all records made. `make docs` runs it, then MkDocs.

python docs/site/stage.py build/site-source
"""

from __future__ import annotations

import json
import posixpath
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from ridgeline.hardware.units import human
from ridgeline.learn.source import lessons

ROOT = Path(__file__).parents[2]
RENAMED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "files/LICENSE.txt",
    "results/README.md": "records.md",
    "results/LOG.md": "log.md",
}
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]*)(#[^)\s]*)?(\))")
REFERENCE = re.compile(r"^(\[[^\]]+\]: )(\S+?)(#\S*)?()$", re.M)
FENCE = re.compile(r"^```(\w+) \w+$", re.M)
FENCED = re.compile(r"(^```.*?^```$)", re.M | re.S)
SHOWN = 6  # values of a record in the table of all
FIRST_UNITS = ("token/s", "tokens/s", "FLOP/s", "B/s", "1/s", "x")


def main(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    for source in documents():
        write(out / page_of(source), staged(source, out))
    for path in (ROOT / "docs").rglob("*"):
        if path.suffix in (".svg", ".ipynb") and "site" not in path.parts:
            copy(path, out / path.relative_to(ROOT / "docs"))
    copy(ROOT / "docs/site/site.css", out / "site.css")
    write(out / "api.md", api_page())
    write(out / "measured.md", measured_page(out))
    write(out.parent / "mkdocs.yml", configuration())
    print(f"{sum(1 for _ in out.rglob('*.md'))} pages in {out}")


def documents() -> list[Path]:
    own = [path for path in RENAMED if path.endswith(".md")]
    found = [path for path in (ROOT / "docs").rglob("*.md") if "site" not in path.parts]
    return [*(ROOT / name for name in own), *sorted(found)]


def page_of(source: Path) -> str:
    """Where a file of the repository stands on the site."""
    name = source.relative_to(ROOT).as_posix()
    if name in RENAMED:
        return RENAMED[name]
    return name.removeprefix("docs/") if name.startswith("docs/") else f"files/{name}"


def staged(source: Path, out: Path) -> str:
    def lead(match: re.Match[str]) -> str:
        before, target, anchor, after = (part or "" for part in match.groups())
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = (source.parent / target).resolve()
        if path.is_dir():
            return before.removesuffix("](").lstrip("![") if after else match[0]
        assert path.exists(), f"{source.name} links to {target}, which is not there"
        page = page_of(path)
        if page.startswith("files/"):
            copy(path, out / page)
        here = posixpath.dirname(page_of(source))
        return before + posixpath.relpath(page, here or ".") + anchor + after

    parts = FENCED.split(source.read_text(encoding="utf-8"))
    led = [
        part if part.startswith("```") else REFERENCE.sub(lead, LINK.sub(lead, part))
        for part in parts
    ]
    return FENCE.sub(r"```\1", "".join(led))


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def configuration() -> str:
    """mkdocs.yml with the lessons and how-tos in place, beside what it builds."""
    text = (ROOT / "docs/site/mkdocs.yml").read_text()
    course = "".join(
        f"\n          - {json.dumps(f'{lesson.number}. {lesson.title}')}: learn/{lesson.slug}.md"
        for lesson in lessons()
    )
    how_tos = sorted((ROOT / "docs/how-to").glob("*.md"), key=lambda path: path.stem != "index")
    listed = "".join(f"\n      - how-to/{path.name}" for path in how_tos)
    text = text.replace(" LESSONS", course).replace(" HOW-TOS", listed)
    return text.replace("../../build/", "").replace("paths: [../..]", "paths: [..]")


def api_page() -> str:
    """Every public name, from its docstring."""
    import ridgeline

    parts = [
        "# Python API",
        "What `import ridgeline` offers; names are loaded on first use. Made from docstrings.",
    ]
    for name in sorted(ridgeline.__all__, key=lambda each: (each.endswith("Error"), each.lower())):
        value = getattr(ridgeline, name)
        if name.startswith("__"):
            continue
        home = getattr(value, "__module__", "ridgeline")
        parts.append(f"::: {home}.{value.__name__}")
    for module, names in {
        "ridgeline.hardware.detection": ("detect",),
        "ridgeline.kernels.ceilings": ("measure",),
        "ridgeline.timing": ("measure", "time_host", "time_device", "time_graph"),
        "ridgeline.learn.session": ("Session",),
    }.items():
        import_module(module)
        parts += [f"::: {module}.{name}" for name in names]
    return "\n\n".join(parts) + "\n"


def measured_page(out: Path) -> str:
    """Tables drawn from the records, the newest first."""
    kinds: dict[str, list[tuple[dict[str, Any], Path]]] = {}
    for path in sorted((ROOT / "results").glob("*.json")):
        copy(path, out / "files/results" / path.name)
        document = json.loads(path.read_text())
        for record in document.get("records", [document])[-1:]:
            if "values" in record:
                kinds.setdefault(kind_of(path.name), []).append((record, path))
    parts = [
        "# All records",
        "Drawn from `results/` when the site was built: for each record some of its values, with "
        "the share of the ceiling where one is known. The file has all of them, with spread, "
        "versions, clocks, commit and command.",
    ]
    for kind, records in kinds.items():
        parts.append(f"## {kind}")
        lines = ["| record | device | date | values |", "|---|---|---|---|"]
        for record, path in sorted(records, key=lambda each: each[0]["created"], reverse=True):
            name = record["name"].removeprefix(f"{kind}-") or kind
            lines.append(
                f"| [{name}](files/results/{path.name}) | {record['hardware']['name']} | "
                f"{record['created'][:10]} | {values_of(record)} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def kind_of(name: str) -> str:
    match = re.match(r"bench-\w+|[a-z]+", name)
    return match[0] if match else name


def values_of(record: dict[str, Any]) -> str:
    """The most telling first: rates, and what has a share of a ceiling."""
    values = record["values"].items()
    order = sorted(
        values,
        key=lambda item: (
            item[1].get("share_of_ceiling") is None,
            item[1]["unit"] not in FIRST_UNITS,
        ),
    )
    texts = []
    for key, value in order[: len(order) if record["name"] == "hardware" else SHOWN]:
        share = value.get("share_of_ceiling")
        more = "" if share is None else f" ({100 * share:.0f}%)"
        unit = value["unit"]
        shown = f"{value['value']:.4g}" if unit in ("1", "x") else human(value["value"], unit)
        texts.append(f"{key.replace('|', '/')} **{shown}**{more}")
    rest = len(order) - len(texts)
    return "<br>".join(texts) + (f"<br>and {rest} more" if rest > 0 else "")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
