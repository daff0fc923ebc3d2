"""`ridgeline data mix a:0.7 b:0.3 --out MIX`: corpora by exact quotas, as data to train on."""

from __future__ import annotations

import argparse
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.arguments.parser import Parser, group
from ridgeline.cli.terminal import Terminal
from ridgeline.data.loading.corpora import is_corpus
from ridgeline.data.loading.mixture import MixedCorpus, Mixture, save_mixture, weight_of
from ridgeline.errors import UsageError

EXAMPLE = """\
ridgeline data mix web:0.7 code:0.3 --out mix
ridgeline train demo --data mix"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "corpora", nargs="+", metavar="CORPUS:WEIGHT", help="built corpora, and how much of each"
    )
    mixture = group(parser, "mixture")
    mixture.add_argument(
        "--skip",
        nargs="+",
        default=[],
        metavar="FIRST-LAST",
        help="samples of the run to leave out; the line `skip` of mixture.json says the same",
    )
    group(parser, "output").add_argument(
        "--out", type=Path, required=True, metavar="MIX", help="folder for mixture.json"
    )


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    from ridgeline.data.corpus.shards import read_index

    corpora = [_corpus(text) for text in args.corpora]
    indexes = [read_index(path) for path, _ in corpora]
    if len({index.tokenizer for index in indexes}) > 1:
        raise UsageError("these corpora are of different tokenizers; build them with one")
    entries = [
        MixedCorpus(os.path.relpath(path.resolve(), args.out.resolve()), weight)
        for path, weight in corpora
    ]
    mixture = Mixture(tuple(entries), tuple(args.skip))
    counts = mixture.quotas().counts.tolist()
    save_mixture(args.out, mixture)
    total = sum(Fraction(weight_of(weight)) for _, weight in corpora)
    return {
        "out": str(args.out),
        "period": sum(counts),
        "skip": list(mixture.skip),
        "corpora": [
            {
                "corpus": str(path),
                "weight": weight,
                "samples_in_period": count,
                "tokens": index.num_tokens,
                # of the run, when it has gone through this corpus once
                "repeats_after_tokens": int(index.num_tokens * total / weight_of(weight)),
            }
            for (path, weight), count, index in zip(corpora, counts, indexes, strict=True)
        ],
    }


def _corpus(text: str) -> tuple[Path, str]:
    name, colon, weight = text.rpartition(":")
    if not colon or not name:
        raise UsageError(f"{text!r} has no weight; give CORPUS:WEIGHT, as web:0.7")
    weight_of(weight)
    if not is_corpus(Path(name)):
        raise UsageError(f"{name} is no built corpus; give a folder that `data build` made")
    return Path(name), weight


def render(document: dict[str, Any], console: Console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("corpus")
    for name in ("weight", f"of {document['period']:,} samples", "tokens", "repeats after"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in document["corpora"]:
        table.add_row(
            entry["corpus"],
            entry["weight"],
            f"{entry['samples_in_period']:,}",
            f"{entry['tokens']:,}",
            f"{entry['repeats_after_tokens']:,} tokens",
        )
    console.print(table)
    console.print(f"train on it: --data {document['out']}", markup=False, soft_wrap=True)
