"""`ridgeline data explain CORPUS`: what a batch holds, by file and byte, and where a byte went."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ridgeline.cli.arguments.parser import Parser, group
from ridgeline.cli.terminal import Terminal
from ridgeline.errors import UsageError

EXAMPLE = """\
ridgeline data explain corpus --batch 1234 --run demo-trained
ridgeline data explain corpus --file crawl/a.jsonl --byte 123456"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("corpus", type=Path, metavar="CORPUS", help="a built corpus, or a mixture")
    subject = group(parser, "what to explain")
    subject.add_argument("--batch", type=int, metavar="N", help="the batch of step N, from 1")
    subject.add_argument("--file", metavar="FILE", help="a file that the corpus was built from")
    subject.add_argument(
        "--byte", type=int, default=0, metavar="B", help="a byte of it, or row of a table (0)"
    )
    order = group(parser, "the run")
    order.add_argument("--run", type=Path, metavar="RUN", help="take what follows from its folder")
    order.add_argument("--sequence-length", type=int, metavar="N", help="tokens in a sequence")
    order.add_argument("--sequences", type=int, metavar="N", help="sequences in a step")
    order.add_argument("--seed", type=int, metavar="N", help="of the order")
    order.add_argument("--held-out", type=float, metavar="X", help="share that is not learned")
    order.add_argument(
        "--tokenizer", metavar="MODEL", help="shows texts and their bytes (the run's, the recipe's)"
    )


@dataclass(frozen=True)
class _ExplainedRun:
    """What decides which sample comes when."""

    sequence_length: int
    sequences: int
    seed: int
    held_out: float
    tokenizer: str | None


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    from ridgeline.data.loading.corpora import is_mixture, open_corpus, open_mixture
    from ridgeline.data.loading.explaining import explain_batch, explain_byte
    from ridgeline.data.loading.split import split_data
    from ridgeline.data.tokenizer import Tokenizer
    from ridgeline.models.checkpoint import resolve_model

    if (args.batch is None) == (args.file is None):
        raise UsageError("give --batch N, or --file FILE with --byte B")
    order = _order(args)
    name = order.tokenizer
    tokenizer = None if name is None else Tokenizer.load(resolve_model(name))
    opened = open_mixture if is_mixture(args.corpus) else open_corpus
    store = opened(args.corpus, tokenizer)
    windows = split_data(
        store,
        sequence_length=order.sequence_length,
        vocab_size=store.vocab_size,
        held_out=order.held_out,
    ).train
    document: dict[str, Any] = {"corpus": str(args.corpus), "run": asdict(order)}
    if args.batch is not None:
        pieces = explain_batch(
            windows,
            seed=order.seed,
            step=args.batch,
            sequences=order.sequences,
            tokenizer=tokenizer,
        )
        return document | {"batch": args.batch, "pieces": [asdict(piece) for piece in pieces]}
    account = explain_byte(
        args.corpus, windows, args.file, args.byte, seed=order.seed, sequences=order.sequences
    )
    return document | {"document": asdict(account)}


def _order(args: argparse.Namespace) -> _ExplainedRun:
    """The run's own settings, or the defaults of `train`, and what flags say instead."""
    from ridgeline.training.config import TrainConfig
    from ridgeline.training.config_file import load_config

    config = TrainConfig() if args.run is None else load_config(args.run)
    given = {
        "sequence_length": args.sequence_length,
        "sequences": args.sequences,
        "seed": args.seed,
        "held_out": args.held_out,
        "tokenizer": args.tokenizer,
    }
    settings = {
        "sequence_length": config.data.sequence_length,
        "sequences": config.batch.size,
        "seed": config.seed,
        "held_out": config.data.held_out,
        "tokenizer": config.tokenizer or config.model or _recipe_tokenizer(args.corpus),
    }
    return _ExplainedRun(
        **settings | {name: value for name, value in given.items() if value is not None}
    )


def _recipe_tokenizer(folder: Path) -> str | None:
    """The name that the corpus was built with."""
    from ridgeline.data.corpus.shards import read_index
    from ridgeline.data.loading.corpora import corpora_of

    recipe = read_index(corpora_of(folder)[0]).facts.get("recipe", {})
    name = recipe.get("tokens", {}).get("tokenizer")
    return name if isinstance(name, str) else None


def render(document: dict[str, Any], console: Console) -> None:
    if "document" in document:
        _render_document(document["document"], console)
        return
    for piece in document["pieces"]:
        parts = [
            f"sample {piece['sample']:,}: {piece['file']} {piece['place']:,}",
            f"tokens {_span(piece['first_token'], piece['num_tokens'])} of the document",
        ]
        if piece["num_bytes"] is not None:
            parts.append(f"bytes {_span(piece['first_byte'], piece['num_bytes'])} of its text")
            parts.append(repr(piece["begins"]))
        console.print(", ".join(parts), markup=False, soft_wrap=True)


def _span(first: int, number: int) -> str:
    return f"{first:,}–{first + number - 1:,}" if number else f"{first:,}"


def _render_document(account: dict[str, Any], console: Console) -> None:
    where = f"{account['file']} {account['place']:,} (document {account['id']})"
    if account["verdict"]:
        console.print(f"{where}: left out, {account['verdict']}", markup=False, soft_wrap=True)
        return
    steps = ", ".join(f"{step:,}" for step in account["steps"]) or "none"
    held = "; a part of it is held out" if account["is_held_out"] else ""
    console.print(
        f"{where}: {account['num_tokens']:,} tokens, learned in steps {steps} of the first epoch"
        f"{held}",
        markup=False,
        soft_wrap=True,
    )
