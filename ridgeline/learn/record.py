"""Runs the whole course and writes a record; needs torch, Triton and the standard library alone.

python -m ridgeline.learn.record --save results --ours     # `make learn-record`
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from ridgeline.formats.files import atomic_write
from ridgeline.hardware import detect
from ridgeline.learn import ours
from ridgeline.learn.running import LessonRun, run_lesson
from ridgeline.learn.source import lessons
from ridgeline.records import Record, Value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", metavar="DIR", help="write a record into DIR")
    parser.add_argument("--ours", action="store_true", help="show its figures as ours from now on")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this lesson")
    args = parser.parse_args()
    if args.ours and (args.only or not args.save):
        parser.error("--ours takes a whole run that is saved: give --save and leave out --only")
    began, runs, failed = time.perf_counter(), list[LessonRun](), list[str]()
    for lesson in lessons():
        if args.only and lesson.name not in args.only:
            continue
        try:
            runs.append(run_lesson(lesson))
            print(f"{lesson.slug:24} {runs[-1].seconds:6.1f} s", flush=True)
        except Exception as error:
            failed.append(f"{lesson.name}: {type(error).__name__}: {error}")
            print(f"{lesson.slug:24} FAILED {failed[-1]}", flush=True)
    whole_s = time.perf_counter() - began
    print(f"{'all':24} {whole_s:6.1f} s")
    record = as_record(runs, whole_s, failed)
    if args.save:
        path = record.save(args.save)
        print(path)
        if args.ours:
            become_ours(record, path.name, runs)
    return 1 if failed else 0


def as_record(runs: list[LessonRun], whole_s: float, failed: list[str]) -> Record:
    values = {
        f"{run.lesson.name}.{figure.key}": Value(figure.value, figure.unit)
        for run in runs
        for figure in run.figures
    }
    values |= {f"{run.lesson.name}.lesson_time": Value(run.seconds, "s") for run in runs}
    values["course_time"] = Value(whole_s, "s")
    notes = [
        f"{run.lesson.name}: not here: {part.hardware}" for run in runs for part in run.missing
    ]
    command = ["python", "-m", "ridgeline.learn.record", *sys.argv[1:]]
    return Record.create(
        "learn", detect(), values, command, notes=[*notes, *(f"failed: {each}" for each in failed)]
    )


def become_ours(record: Record, name: str, runs: list[LessonRun]) -> None:
    machine = "cpu" if record.hardware["device_type"] == "cpu" else "h200"
    document = json.loads(ours.PATH.read_text()) if ours.PATH.exists() else {}
    words = {f"{run.lesson.name}.{each.key}": each.words for run in runs for each in run.figures}
    figures = {
        key: {"value": value.value, "unit": value.unit, "words": words.get(key, "")}
        for key, value in record.values.items()
    }
    document[machine] = {"record": name, "name": record.hardware["name"], "figures": figures}
    with atomic_write(ours.PATH) as file:
        json.dump(document, file, indent=1, ensure_ascii=False)
        file.write("\n")


if __name__ == "__main__":
    sys.exit(main())
