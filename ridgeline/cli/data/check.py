"""`ridgeline data check CORPUS`: every file against the index, and each document's account."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from ridgeline.cli.arguments.parser import Parser
from ridgeline.cli.terminal import Terminal
from ridgeline.errors import CHECK_FAILED_EXIT_CODE

EXAMPLE = "ridgeline data check corpus"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("corpus", type=Path, metavar="CORPUS", help="folder of a built corpus")


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    from ridgeline.data.corpus.shards.checking import check_corpus

    with terminal.progress() as progress:
        check = check_corpus(args.corpus, progress)
    return {
        "corpus": str(args.corpus),
        "tokens": check.index.num_tokens,
        "documents": check.index.num_documents,
        "shards": len(check.index.shards),
        "verdicts": check.verdicts,
        "certificate": check.index.certificate.to_json(),
        "certificate_words": check.index.certificate.words(),
        "problems": list(check.problems),
    }


def render(document: dict[str, Any], console: Console) -> None:
    for problem in document["problems"]:
        console.print(f"wrong: {problem}", markup=False, soft_wrap=True)
    dropped = {name: number for name, number in document["verdicts"].items() if name}
    total = sum(document["verdicts"].values())
    words = ", ".join(f"{number:,} {name}" for name, number in dropped.items()) or "none"
    console.print(f"{total:,} documents: {document['documents']:,} kept; left out: {words}")
    console.print(f"{document['shards']:,} shards, {document['certificate_words']}", soft_wrap=True)
    console.print("sound" if not document["problems"] else "damaged: build it again")


def exit_code(document: dict[str, Any]) -> int:
    return CHECK_FAILED_EXIT_CODE if document["problems"] else 0
