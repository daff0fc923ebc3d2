"""Reads the lessons: from a file in the percent format to a `Lesson` of cells. No torch.

lesson = find_lesson("5")            # by number, or by name: find_lesson("softmax")
lesson.title, lesson.points          # "Softmax, …", what to take along
lesson.starter                       # the exercise without its solution
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, cast, get_args

from ridgeline.errors import UsageError, near_matches

CellKind = Literal["markdown", "code", "picture", "exercise", "check"]
FOLDER = Path(__file__).parent / "lessons"
FILE_NAME = re.compile(r"lesson_(\d\d)_(\w+)\.py")
MARK = re.compile(r"# %%(?: \[(\w+)\])?$")
POINTS, PLACES, TASK = "Take along", "In the tree", "Exercise"  # headings every lesson has
BEGIN, END = "# your code", "# end of your code"  # around an exercise's solution


@dataclass(frozen=True)
class LessonCell:
    kind: CellKind
    text: str  # of a markdown cell without the comment signs
    line: int  # in the file, of its first line


@dataclass(frozen=True)
class Lesson:
    number: int
    name: str
    path: Path
    cells: tuple[LessonCell, ...]

    @property
    def slug(self) -> str:
        """What its page, notebook and picture are called."""
        return f"{self.number:02d}-{self.name.replace('_', '-')}"

    @cached_property
    def title(self) -> str:
        return self.cells[0].text.splitlines()[0].removeprefix("# ")

    @property
    def code(self) -> list[LessonCell]:
        """What runs, in order."""
        return self.of_kind("code")

    def of_kind(self, kind: CellKind) -> list[LessonCell]:
        return [cell for cell in self.cells if cell.kind == kind]

    @property
    def points(self) -> list[str]:
        return self.list_below(POINTS)

    @property
    def places(self) -> list[str]:
        return self.list_below(PLACES)

    @property
    def task(self) -> str:
        return self.section(TASK)

    @property
    def function(self) -> str:
        """The name of what the exercise asks for."""
        tree = ast.parse(self.of_kind("exercise")[0].text)
        return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)][-1]

    @property
    def solution(self) -> str:
        lines = self.of_kind("exercise")[0].text.splitlines()
        return "\n".join(line for line in lines if line.strip() not in (BEGIN, END))

    @property
    def starter(self) -> str:
        """The exercise with what stands between the two marks taken out."""
        kept, inside, is_kernel, marked = list[str](), False, False, False
        for line in self.of_kind("exercise")[0].text.splitlines():
            if line.startswith(("def ", "@")):
                is_kernel, marked = marked, line.startswith("@triton")
            if line.strip() == BEGIN:
                inside = True
                indent = line[: len(line) - len(line.lstrip())]
                empty = "pass" if is_kernel else 'raise NotImplementedError("your code")'
                kept += [indent + BEGIN, indent + empty]
            elif line.strip() == END:
                inside = False
            elif not inside:
                kept.append(line)
        return "\n".join(kept)

    def section(self, heading: str) -> str:
        """The prose below a heading of the second level, up to the next."""
        text = "\n\n".join(cell.text for cell in self.of_kind("markdown"))
        match = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
        assert match is not None, f"{self.path.name} has no section {heading!r}"
        return match[1].strip()

    def list_below(self, heading: str) -> list[str]:
        items = re.findall(r"^- (.*?)(?=^- |\Z)", self.section(heading) + "\n", re.M | re.S)
        return [" ".join(item.split()) for item in items]


@cache
def lessons() -> tuple[Lesson, ...]:
    files = sorted(path for path in FOLDER.glob("*.py") if FILE_NAME.fullmatch(path.name))
    return tuple(read_lesson(path) for path in files)


def read_lesson(path: Path) -> Lesson:
    match = FILE_NAME.fullmatch(path.name)
    assert match is not None, f"{path.name} is no lesson_NN_name.py"
    return Lesson(int(match[1]), match[2], path, tuple(_cells(path.read_text(encoding="utf-8"))))


def find_lesson(word: str) -> Lesson:
    """By number or name."""
    for lesson in lessons():
        if word in (lesson.name, lesson.slug) or word.lstrip("0") == str(lesson.number):
            return lesson
    hint = near_matches(word, [lesson.name for lesson in lessons()])
    raise UsageError(f"there is no lesson {word!r}; give 1 to {len(lessons())}, or a name{hint}")


def _cells(text: str) -> list[LessonCell]:
    cells: list[LessonCell] = []
    kind: CellKind | None = None
    first, lines = 0, list[str]()

    def close() -> None:
        if kind is None:
            return
        body = [line[2:] for line in lines] if kind == "markdown" else lines
        empty = next((at for at, line in enumerate(body) if line.strip()), 0)
        cells.append(LessonCell(kind, "\n".join(body).strip("\n"), first + empty))

    for number, line in enumerate(text.splitlines(), 1):
        match = MARK.fullmatch(line)
        if match is None:
            lines.append(line)
            continue
        close()
        word = match[1] or "code"
        assert word in get_args(CellKind), f"line {number}: a cell cannot be {word!r}"
        kind, first, lines = cast(CellKind, word), number + 1, []
    close()
    return cells
