"""Makes each lesson's page, picture and notebook from its one file, and the course's table of
contents; and the glossary's page. `make learn` writes them into docs/; a test fails when they are
not current.

    python -m ridgeline.learn.pages docs
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ridgeline.formats.files import atomic_write
from ridgeline.learn.glossary import glossary_page
from ridgeline.learn.ours import MACHINES, figures_of, our_figure, record_of
from ridgeline.learn.pictures import LessonPicture
from ridgeline.learn.running import execute, fresh_namespace
from ridgeline.learn.session import shown
from ridgeline.learn.source import Lesson, LessonCell, lessons

MADE = "<!-- made from ridgeline/learn/lessons/{} by `make learn`: edit that -->"
NEEDS = """\
try:
    import ridgeline
except ImportError:  # in Colab and the like: put the wheel of `make package` beside this notebook
    %pip install --quiet ridgeline-*.whl
"""


def files() -> dict[str, str]:
    """Every made file by its path below docs/."""
    made = {"glossary.md": glossary_page(), "learn/index.md": contents()}
    for lesson in lessons():
        picture = drawn(lesson)
        made[f"learn/{lesson.slug}.svg"] = picture.svg()
        made[f"learn/{lesson.slug}.md"] = page(lesson, picture.words)
        made[f"learn/{lesson.slug}.ipynb"] = (
            json.dumps(notebook(lesson, picture), indent=1, ensure_ascii=False) + "\n"
        )
    return made


def drawn(lesson: Lesson) -> LessonPicture:
    namespace = fresh_namespace(lesson)
    for cell in lesson.of_kind("picture"):
        execute(cell, lesson, namespace)
    picture = namespace["picture"]
    assert isinstance(picture, LessonPicture), f"{lesson.path.name} draws no picture"
    return picture


def page(lesson: Lesson, alt: str) -> str:
    parts = [MADE.format(lesson.path.name)]
    last_code = lesson.code[-1]
    for cell in lesson.cells:
        if cell.kind == "markdown":
            parts.append(cell.text)
        elif cell.kind == "code":
            parts.append(f"```python lesson\n{cell.text}\n```")
            if cell is last_code:
                parts.append(figures_part(lesson))
        elif cell.kind == "picture":
            parts.append(f"![{alt}]({lesson.slug}.svg)")
        elif cell.kind == "exercise":
            parts.append(exercise_part(lesson))
    parts.append(neighbours(lesson))
    return "\n\n".join(part for part in parts if part) + "\n"


def figures_part(lesson: Lesson) -> str:
    """Our figures of the lesson, and how to get the reader's."""
    command = (
        f"`ridgeline learn {lesson.number}` runs all of this here and puts your figures beside ours"
    )
    rows = list(figure_rows(lesson))
    if not rows:
        return f"{command}."
    names = list(MACHINES.values())
    head = ["figure", *names]
    sources = [
        f"{MACHINES[machine]}: [record](../../results/{record})"
        for machine in MACHINES
        if (record := record_of(machine)) is not None
    ]
    lines = [f"| {' | '.join(head)} |", f"|---|{'---|' * len(names)}", *rows]
    return f"{command}:\n\n" + "\n".join(lines) + "\n\n" + "  \n".join(sources)


def figure_rows(lesson: Lesson) -> Iterable[str]:
    keys = dict.fromkeys(
        key.partition(".")[2]
        for machine in MACHINES
        for key in figures_of(machine)
        if key.startswith(f"{lesson.name}.") and not key.endswith(".lesson_time")
    )
    for key in keys:
        cells = []
        for machine in MACHINES:
            ours = our_figure(machine, lesson.name, key)
            cells.append("–" if ours is None else shown(*ours))
        yield f"| {words_of(lesson, key)} | {' | '.join(cells)} |"


def words_of(lesson: Lesson, key: str) -> str:
    for machine in MACHINES:
        words = figures_of(machine).get(f"{lesson.name}.{key}", {}).get("words")
        if words:
            return str(words)
    return key.replace("_", " ")


def exercise_part(lesson: Lesson) -> str:
    number = lesson.number
    return f"""```sh
ridgeline learn {number} --starter mine.py  # what follows, to be filled in
ridgeline learn {number} --check mine.py  # the first case that fails, or that all pass
```

```python lesson
{lesson.starter}
```

<details markdown="1"><summary>One solution</summary>

```python lesson
{lesson.solution}
```

</details>"""


def neighbours(lesson: Lesson) -> str:
    every = lessons()
    at = every.index(lesson)
    links = [f"[notebook]({lesson.slug}.ipynb)", "[contents](index.md)"]
    if at > 0:
        links.append(f"before: [{every[at - 1].title}]({every[at - 1].slug}.md)")
    if at + 1 < len(every):
        links.append(f"next: [{every[at + 1].title}]({every[at + 1].slug}.md)")
    return "---\n\n" + " ·\n".join(links)


def contents() -> str:
    rows = [
        f"| {lesson.number} | [{lesson.title}]({lesson.slug}.md) | "
        f"[notebook]({lesson.slug}.ipynb) |"
        for lesson in lessons()
    ]
    return CONTENTS.format(table="\n".join(rows))


CONTENTS = """<!-- made by ridgeline/learn/pages.py -->
# The course

Making models fast, learned by running it. Each lesson is a page of at most ten minutes, with code
that runs on your machine, a picture, an exercise with a check, and the place in this project where
the real thing lives. A GPU is not needed: kernels run under Triton's interpreter then, and a lesson
whose hardware is missing says what it would show.

```sh
ridgeline learn  # the lessons, and how far you are
ridgeline learn 1  # run one: your figures beside ours
ridgeline learn 1 --read  # its text in the terminal
ridgeline learn 1 --starter mine.py  # its exercise; then --check mine.py
ridgeline explain occupancy  # a term, with this machine's figures
```

| | lesson | |
|---|---|---|
{table}

Where to go from here: [how-tos](../how-to/index.md) from a symptom to a command, the
[reading list](reading.md), a [road through the course](roadmap.md) for what you want to do, and the
[table of topics](topics.md) with lesson, command and file of each.
"""


def notebook(lesson: Lesson, picture: LessonPicture) -> dict[str, Any]:
    """Of nbformat 4.5. The picture is in it, so that the file opens without its folder; the
    exercise's cases stand at the end.
    """
    cells = [notebook_cell("code", NEEDS.rstrip("\n"), "needs")]
    for at, cell in enumerate(lesson.cells):
        if (text := notebook_text(lesson, cell, picture)) is not None:
            kind = "markdown" if cell.kind in ("markdown", "picture") else "code"
            cells.append(notebook_cell(kind, text, f"cell-{at}"))
    trying = CHECKING.format(function=lesson.function)
    cells.append(notebook_cell("code", trying, "checking"))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


CHECKING = """\
from ridgeline.learn.trials import first_failure

first_failure(trials({function}))  # (cases that pass, the first that fails)"""


def notebook_text(lesson: Lesson, cell: LessonCell, picture: LessonPicture) -> str | None:
    if cell.kind == "picture":
        data = base64.b64encode(picture.svg().encode()).decode()
        return f"![{picture.words}](data:image/svg+xml;base64,{data})"
    if cell.kind == "exercise":
        return lesson.starter
    if cell.kind == "code":
        return cell.text.replace("__file__", repr(lesson.path.name))
    return cell.text


def notebook_cell(kind: str, text: str, name: str) -> dict[str, Any]:
    cell: dict[str, Any] = {
        "cell_type": kind,
        "id": name,
        "metadata": {},
        "source": text.splitlines(keepends=True),
    }
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    for name, text in files().items():
        with atomic_write(folder / name) as file:
            file.write(text)
    print(f"{len(files())} files in {folder}")


if __name__ == "__main__":
    main()
