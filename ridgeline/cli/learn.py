"""`ridgeline learn`: the course. Lists the lessons, runs one on this machine, hands out its
exercise and checks an answer.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from ridgeline.cli.arguments.options import add_save
from ridgeline.cli.arguments.parser import group
from ridgeline.cli.terminal import Terminal
from ridgeline.errors import CHECK_FAILED_EXIT_CODE, OutputError, UsageError
from ridgeline.formats.files import atomic_write
from ridgeline.learn.checking import check_answer
from ridgeline.learn.ours import MACHINES, our_figure
from ridgeline.learn.record import as_record
from ridgeline.learn.running import LessonRun, run_lesson
from ridgeline.learn.source import Lesson, find_lesson, lessons
from ridgeline.learn.standing import note, standing

EXAMPLE = """\
ridgeline learn
ridgeline learn 5 --read
ridgeline learn 5
ridgeline learn 5 --starter mine.py
ridgeline learn 5 --check mine.py"""

ALL = "all"
LESSON_HELP = "number or name; `all` runs the whole course; without one, the lessons are listed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lesson", metavar="LESSON", nargs="?", help=LESSON_HELP)
    group(parser, "reading").add_argument(
        "--read", action="store_true", help="show the lesson's text here instead of running it"
    )
    exercise = group(parser, "exercise")
    exercise.add_argument(
        "--starter", type=Path, metavar="FILE", help="write the exercise into FILE, to be filled in"
    )
    exercise.add_argument(
        "--check", type=Path, metavar="FILE", help="check an answer: the first case that fails"
    )
    add_save(parser)


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    chosen = [name for name in ("read", "starter", "check", "save") if getattr(args, name)]
    if len(chosen) > 1:
        raise UsageError(f"--{chosen[0]} and --{chosen[1]} are two things; give one of them")
    if args.lesson is None or args.lesson == ALL:
        if set(chosen) - ({"save"} if args.lesson == ALL else set()):
            raise UsageError(f"--{chosen[0]} is for one lesson; name it: ridgeline learn 5")
        return run_all(args.save, terminal) if args.lesson == ALL else listing()
    lesson = find_lesson(args.lesson)
    head = {"number": lesson.number, "name": lesson.name, "title": lesson.title}
    if args.read:
        text = "\n\n".join(cell_text(cell.kind, cell.text) for cell in lesson.cells)
        return {"action": "read", **head, "text": text}
    if args.starter is not None:
        return {"action": "starter", **head, "file": write_starter(lesson, args.starter)}
    if args.check is not None:
        result = check_answer(lesson, args.check)
        if result["failure"] is None:
            note(lesson.name, "solved")
        return {"action": "check", **head, "file": str(args.check), **result}
    with terminal.progress() as progress:
        progress(lesson.title, 0, 1)
        done = run_lesson(lesson)
    note(lesson.name, "ran")
    document = {"action": "run", **run_document(done)}
    return document | saved([done], args.save)


def exit_code(document: dict[str, Any]) -> int:
    return CHECK_FAILED_EXIT_CODE if document.get("failure") else 0


def cell_text(kind: str, text: str) -> str:
    """As it is read: the picture's and the check's code are left out."""
    if kind == "code":
        return f"```python\n{text}\n```"
    return text if kind == "markdown" else ""


def listing() -> dict[str, Any]:
    known = standing()
    rows = [
        {
            "number": lesson.number,
            "name": lesson.name,
            "title": lesson.title,
            "ran": "ran" in known.get(lesson.name, []),
            "solved": "solved" in known.get(lesson.name, []),
        }
        for lesson in lessons()
    ]
    return {"action": "list", "lessons": rows}


def write_starter(lesson: Lesson, path: Path) -> str:
    if path.exists():
        raise OutputError(f"{path} exists; name another file, or remove it first")
    with atomic_write(path) as file:
        file.write(lesson.starter + "\n")
    return str(path)


def run_all(save: Path | None, terminal: Terminal) -> dict[str, Any]:
    runs = []
    with terminal.progress() as progress:
        for lesson in lessons():
            progress("lessons", lesson.number - 1, len(lessons()))
            runs.append(run_lesson(lesson))
            note(lesson.name, "ran")
    document = {"action": "all", "lessons": [run_document(each) for each in runs]}
    return document | saved(runs, save)


def saved(runs: list[LessonRun], folder: Path | None) -> dict[str, Any]:
    if folder is None:
        return {}
    record = as_record(runs, sum(run.seconds for run in runs), [])
    return {"record": str(record.save(folder))}


def run_document(run: LessonRun) -> dict[str, Any]:
    lesson = run.lesson
    figures = []
    for figure in run.figures:
        ours = {
            machine: None if value is None else value.value
            for machine in MACHINES
            if (value := our_figure(machine, lesson.name, figure.key)) or value is None
        }
        figures.append({**asdict(figure), "ours": ours})
    return {
        "number": lesson.number,
        "name": lesson.name,
        "title": lesson.title,
        "device": run.device,
        "seconds": run.seconds,
        "figures": figures,
        "missing": [asdict(part) for part in run.missing],
        "points": lesson.points,
        "places": lesson.places,
        "printed": run.printed,
    }


def render(document: dict[str, Any], console: Console) -> None:
    action = document["action"]
    if action == "list":
        render_list(document["lessons"], console)
    elif action == "read":
        console.print(Markdown(document["text"]))
    elif action == "starter":
        console.print(f"{document['file']}: fill in the function, then")
        console.print(f"  ridgeline learn {document['number']} --check {document['file']}")
    elif action == "check":
        render_check(document, console)
    else:
        for each in document["lessons"] if action == "all" else [document]:
            render_run(each, console)
    if "record" in document:
        console.print(f"record: {document['record']}")


def render_list(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for heading in ("", "lesson", "name", "ran", "exercise"):
        table.add_column(heading, justify="right" if not heading else "left")
    for row in rows:
        table.add_row(
            str(row["number"]),
            row["title"],
            Text(row["name"], style="dim"),
            "yes" if row["ran"] else "",
            "solved" if row["solved"] else "",
        )
    console.print(table)
    ran, solved = (sum(row[key] for row in rows) for key in ("ran", "solved"))
    console.print(
        f"\n{ran} of {len(rows)} run, {solved} exercises solved. `ridgeline learn 1` runs a "
        "lesson, `--read` shows its text; the pages are in docs/learn/.",
        style="dim",
    )


def render_run(document: dict[str, Any], console: Console) -> None:
    console.print(f"\n{document['number']}. {document['title']}", style="bold")
    console.print(f"{document['device']}, {document['seconds']:.1f} s", style="dim")
    console.print(figure_table(document["figures"]))
    for part in document["missing"]:
        console.print(
            f"Not here: {part['hardware']}. It would show {part['shows']}.", style="yellow"
        )
    console.print("\nTake along", style="bold")
    for point in document["points"]:
        console.print(Markdown(f"- {point}"))
    console.print("\nIn the tree", style="bold")
    for place in document["places"]:
        console.print(Markdown(f"- {place}"))
    number = document["number"]
    console.print(f"\nExercise: ridgeline learn {number} --starter mine.py", style="dim")


def figure_table(figures: list[dict[str, Any]]) -> Table:
    from ridgeline.learn.session import shown

    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("measured or computed here")
    table.add_column("yours", justify="right", no_wrap=True)
    for name in MACHINES.values():
        table.add_column(name, justify="right", no_wrap=True)
    for figure in figures:
        ours = [figure["ours"][machine] for machine in MACHINES]
        table.add_row(
            figure["words"],
            Text(shown(figure["value"], figure["unit"]), style="bold"),
            *("–" if value is None else shown(value, figure["unit"]) for value in ours),
        )
    return table


def render_check(document: dict[str, Any], console: Console) -> None:
    failure, passed = document["failure"], document["passed"]
    if failure is None:
        console.print(f"Right: {passed} cases pass.", style="green")
        return
    count = "" if not passed else f" ({passed} before it pass)"
    console.print(f"The first case that fails{count}:", style="bold")
    for name, key in (("given", "given"), ("right is", "want"), ("yours", "answer")):
        console.print(Text(f"  {name:9} {failure[key]}"))
    if failure["hint"]:
        console.print(Text(f"  {'hint':9} {failure['hint']}"))
