"""`ridgeline bench serve`: load on any OpenAI endpoint, or on several side by side."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ridgeline.bench.engine import Percentiles
from ridgeline.bench.serve.arrivals import PATTERNS, Arrivals
from ridgeline.bench.serve.bound import LatencyBound
from ridgeline.bench.serve.endpoint import Met, meet
from ridgeline.bench.serve.find import FindSettings, find_rate
from ridgeline.bench.serve.http import Endpoint
from ridgeline.bench.serve.load import LoadProcesses
from ridgeline.bench.serve.measure import ServeRun, measure, values_of
from ridgeline.bench.serve.plot import check_plot, draw
from ridgeline.bench.serve.prompts import PATHS
from ridgeline.bench.serve.search import HighestRate
from ridgeline.cli.arguments.options import add_latency_bounds, add_save, add_workload, first_key
from ridgeline.cli.arguments.parser import group
from ridgeline.cli.bench import beside
from ridgeline.cli.bench.serve_table import render as render_load
from ridgeline.cli.terminal import Terminal
from ridgeline.data import Tokenizer
from ridgeline.data.traces import load_workload
from ridgeline.data.workload import MIXES, Workload
from ridgeline.engine.loading.saved import tokenizer_of
from ridgeline.errors import UsageError
from ridgeline.hardware import detect
from ridgeline.models.checkpoint import resolve_model
from ridgeline.progress import Progress
from ridgeline.records import Record, Value

EXAMPLE = """\
ridgeline bench serve --url http://127.0.0.1:8000 --rate 4 --plot serve.html
ridgeline bench serve --url http://127.0.0.1:8000 --find --ttft-ms 500
ridgeline bench serve --beside-engine demo --concurrency 16 --requests 32"""
MAIN_FLAGS = (
    "--url", "--beside-engine", "--model", "--api-key-file", "--workload", "--requests", "--rate",
    "--concurrency", "--ttft-ms", "--tpot-ms", "--find", "--save", "--plot",
)  # fmt: skip

DEFAULT_REQUESTS = 200  # where a rate or clients are given, and the workload has fewer


def render(result: dict[str, Any], console: Console) -> None:
    (beside.render if result.get("beside") else render_load)(result, console)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server = group(parser, "endpoint")
    server.add_argument(
        "--url", action="append", default=[], metavar="URL",
        help="endpoint, e.g. http://127.0.0.1:8000 (repeat to compare several)",
    )  # fmt: skip
    server.add_argument(
        "--model", metavar="NAME", help="model name to send (default: the first the endpoint lists)"
    )
    server.add_argument(
        "--api", choices=tuple(PATHS), default="completions", help="(default: %(default)s)"
    )
    beside.add_arguments(server)
    server.add_argument(
        "--api-key-file", type=Path, metavar="FILE",
        help="file with API keys, as `ridgeline serve` reads it; the first is sent "
        "(default: $OPENAI_API_KEY)",
    )  # fmt: skip
    server.add_argument(
        "--timeout-s", type=float, default=600.0, metavar="S", help="per request (default: 600)"
    )
    _add_load(parser)
    _add_bound(parser)
    output = add_save(parser)
    output.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw the latencies, as .html"
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    workload = add_workload(parser, "cpu")
    workload.add_argument(
        "--requests", type=int, metavar="N", help="number of requests; the workload repeats"
    )
    workload.add_argument(
        "--max-context", type=int, metavar="N", help="drop requests of more than N tokens"
    )
    workload.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="make prompts of exactly the workload's lengths with this model's tokenizer "
        "(default: by words, about that long)",
    )
    load = group(parser, "load")
    load.add_argument(
        "--rate", type=float, metavar="X", help="requests/s on average; with --find, the first rate"
    )
    load.add_argument(
        "--arrivals",
        choices=PATTERNS,
        help="arrival times: the trace's own, or random or even at --rate (default: trace; poisson "
        "with --rate)",
    )
    load.add_argument(
        "--concurrency", type=int, metavar="N", help="N clients that each wait for their answer"
    )
    load.add_argument(
        "--processes", type=int, default=1, metavar="N", help="client processes (default: 1)"
    )
    load.add_argument(
        "--rounds", type=int, default=1, metavar="N",
        help="rounds; endpoints take turns (default: 1)",
    )  # fmt: skip
    load.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of arrivals and prompts (default: 0)"
    )


def _add_bound(parser: argparse.ArgumentParser) -> None:
    bounds = group(parser, "latency bounds")
    add_latency_bounds(bounds, "")
    bounds.add_argument(
        "--find", action="store_true", help="find the highest request rate within the bounds"
    )
    settings = FindSettings.__dataclass_fields__
    for flag, name, meaning in (
        ("--share", "target", "share of requests that must meet the bounds"),
        ("--precision", "precision", "gap between the highest passing rate and a failing one"),
        ("--probe-s", "probe_s", "seconds per rate, at least"),
        ("--max-probes", "max_probes", "most rates and repeats to try"),
    ):
        default: Any = settings[name].default
        text = f"with --find: {meaning} (default: {default:g})"
        bounds.add_argument(flag, dest=name, type=type(default), metavar="X", help=text)


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    bound = checked(args)
    if beside.is_asked_for(args):
        return beside.run(args, asked_workload(args, None), terminal)
    settings = find_settings(args, bound) if args.find else None
    endpoints = [
        Endpoint.parse(url, first_key(args.api_key_file, "--api-key-file")) for url in args.url
    ]
    tokenizer = asked_tokenizer(args)
    workload = asked_workload(args, tokenizer)
    arrivals = asked_arrivals(args, workload)
    mets = [meet(endpoint, args.api, args.model, tokenizer) for endpoint in endpoints]
    highest: dict[str, HighestRate] = {}
    with terminal.progress() as progress, LoadProcesses(args.processes) as load:
        if settings is None:
            runs = measured(args, load, mets, workload, arrivals, bound, progress)
        else:
            runs, highest = searched(load, mets, workload, settings, progress)
    document = documented(args, workload, arrivals, mets, runs, highest)
    return written(
        args, document, {url: middle(each) for url, each in runs.items()}, highest, bound
    )


def measured(
    args: argparse.Namespace,
    load: LoadProcesses,
    mets: list[Met],
    workload: Workload,
    arrivals: Arrivals,
    bound: LatencyBound,
    progress: Progress,
) -> dict[str, list[ServeRun]]:
    """All rounds of each endpoint: they take turns, so that what changes meanwhile is shared."""
    runs: dict[str, list[ServeRun]] = {met.endpoint.url: [] for met in mets}
    for number, met in enumerate(mets * args.rounds):
        seed = args.seed + 1000 * (number // len(mets))
        run = measure(load, met, workload, arrivals, bound, seed=seed, timeout_s=args.timeout_s)
        runs[met.endpoint.url].append(run)
        progress("endpoints and rounds", number + 1, len(mets) * args.rounds)
    return runs


def searched(
    load: LoadProcesses,
    mets: list[Met],
    workload: Workload,
    settings: FindSettings,
    progress: Progress,
) -> tuple[dict[str, list[ServeRun]], dict[str, HighestRate]]:
    """The run at each endpoint's highest rate, and how that was found."""
    runs, highest = {}, {}
    for met in mets:
        shown = Told(met, progress, settings)
        highest[met.endpoint.url], run = find_rate(load, met, workload, settings, shown)
        runs[met.endpoint.url] = [run]
    return runs, highest


def written(
    args: argparse.Namespace,
    document: dict[str, Any],
    runs: dict[str, ServeRun],
    highest: dict[str, HighestRate],
    bound: LatencyBound,
) -> dict[str, Any]:
    """With the files that were asked for."""
    if args.plot is not None:
        draw(args.plot, runs, highest, bound)
        document["plot"] = str(args.plot)
    if args.save is not None:
        document["record"] = str(record_of(document, runs, highest).save(args.save))
    return document


class Told:
    """Progress of a search: how many probes are done, of as many as there may be."""

    def __init__(self, met: Met, progress: Progress, settings: FindSettings) -> None:
        self.label, self.progress = f"probes of {met.endpoint.url}", progress
        self.num, self.most = 0, settings.max_probes

    def __call__(self, rate: float, run: ServeRun) -> None:
        self.num += 1
        self.progress(self.label, self.num, self.most)


EXCLUDING = (
    ("concurrency", "rate"),
    ("concurrency", "arrivals"),
    ("find", "concurrency"),
    ("find", "requests"),
)
SEARCH_FLAGS = {"target": "share", "precision": "precision", "probe_s": "probe-s",
                "max_probes": "max-probes"}  # fmt: skip


def checked(args: argparse.Namespace) -> LatencyBound:
    """What contradicts itself is refused before anything is sent."""
    beside.check(args)
    for name in ("rounds", "processes", "requests", "output_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; give at least 1")
    if not 0 < args.timeout_s < float("inf"):
        raise UsageError(f"--timeout-s is {args.timeout_s:g}; give seconds above 0")
    if len(set(args.url)) < len(args.url):
        raise UsageError("--url is the same endpoint twice; give each once")
    for first, second in EXCLUDING:
        if getattr(args, first) and getattr(args, second):
            raise UsageError(f"--{first} and --{second} do not go together; remove one")
    if args.arrivals in ("poisson", "fixed") and args.rate is None and not args.find:
        raise UsageError(f"--arrivals {args.arrivals} needs a --rate")
    _check_search(args)
    if args.plot is not None:
        check_plot(args.plot)
    return LatencyBound.of_ms(args.ttft_ms, args.tpot_ms)


def _check_search(args: argparse.Namespace) -> None:
    for name, flag in SEARCH_FLAGS.items():
        if getattr(args, name) is not None and not args.find:
            raise UsageError(f"--{flag} needs --find")
    if args.find and args.rounds > 1:
        raise UsageError("--find repeats uncertain rates by itself; remove --rounds")


def find_settings(args: argparse.Namespace, bound: LatencyBound) -> FindSettings:
    given = {name: getattr(args, name) for name in SEARCH_FLAGS}
    given = {name: value for name, value in given.items() if value is not None}
    return FindSettings(
        bound,
        **given,
        pattern=args.arrivals or "poisson",
        start=args.rate,
        timeout_s=args.timeout_s,
        seed=args.seed,
    )


def asked_tokenizer(args: argparse.Namespace) -> Tokenizer | None:
    if args.tokenizer is None:
        return None
    tokenizer = tokenizer_of(resolve_model(args.tokenizer))
    if tokenizer is None:
        raise UsageError(
            f"--tokenizer {args.tokenizer!r} has no tokenizer; give a model that has one"
        )
    return tokenizer


def asked_workload(args: argparse.Namespace, tokenizer: Tokenizer | None) -> Workload:
    workload = load_workload(
        args.workload, tokenizer=tokenizer, num_output_tokens=args.output_tokens
    )
    is_text = args.workload not in MIXES and workload.requests[0].prompt is not None
    if is_text and args.api == "chat":
        raise UsageError(
            f"the prompts in {args.workload} already include the chat template; "
            "use --api completions"
        )
    return workload if args.max_context is None else workload.within(args.max_context)


def asked_arrivals(args: argparse.Namespace, workload: Workload) -> Arrivals:
    """In a search the rates are the search's own; this one is not used then."""
    num = args.requests or len(workload.requests)
    if args.concurrency is not None:
        return Arrivals.of_clients(args.concurrency, args.requests or max(num, DEFAULT_REQUESTS))
    if args.arrivals in (None, "trace") and (args.rate is None or args.arrivals == "trace"):
        return Arrivals.of_trace(workload, args.rate, num)
    num = args.requests or max(num, DEFAULT_REQUESTS)
    return Arrivals.at_rate(args.rate or 1.0, num, args.arrivals or "poisson", args.seed)


def middle(runs: list[ServeRun]) -> ServeRun:
    """The round in the middle, by what it got through."""
    return sorted(runs, key=lambda run: run.output_tokens_per_s)[len(runs) // 2]


def documented(
    args: argparse.Namespace,
    workload: Workload,
    arrivals: Arrivals,
    mets: list[Met],
    runs: dict[str, list[ServeRun]],
    highest: dict[str, HighestRate],
) -> dict[str, Any]:
    return {
        "api": args.api,
        "workload": workload.name,
        "arrivals": f"{args.arrivals or 'poisson'}, rates tried"
        if args.find
        else arrivals.description,
        "processes": args.processes,
        "bound": {"ttft_ms": args.ttft_ms, "tpot_ms": args.tpot_ms},
        "endpoints": [
            {
                "url": met.endpoint.url,
                "model": met.maker.model,
                "notes": met.notes,
                "rounds": [run.output_tokens_per_s for run in runs[met.endpoint.url]],
                **run_json(middle(runs[met.endpoint.url])),
                "found": found_json(highest.get(met.endpoint.url)),
            }
            for met in mets
        ],
    }


def run_json(run: ServeRun) -> dict[str, Any]:
    values = {name: value for name, value in vars(run).items() if name != "samples"}
    for name, value in values.items():
        if isinstance(value, Percentiles):
            values[name] = value._asdict()
    return values | {
        "own": run.own._asdict(),
        "within": None if run.within is None else run.within.to_json(),
        "requests_per_s": run.requests_per_s,
        "output_tokens_per_s": run.output_tokens_per_s,
        "goodput": run.goodput,
        "client_note": run.client_note,
    }


def found_json(highest: HighestRate | None) -> dict[str, Any] | None:
    if highest is None:
        return None
    tried = [asdict(each) | {"share": each.share.to_json()} for each in highest.tried]
    return {
        "rate": None if highest.met is None else highest.met.rate,
        "failed_rate": None if highest.failed is None else highest.failed.rate,
        "is_sure": highest.is_sure,
        "in_words": highest.in_words,
        "tried": tried,
    }


def record_of(
    document: dict[str, Any], runs: dict[str, ServeRun], highest: dict[str, HighestRate]
) -> Record:
    """One record; with several endpoints, their values are numbered in the order of the URLs."""
    values: dict[str, Value] = {}
    notes = []
    for number, (url, run) in enumerate(runs.items(), 1):
        prefix = f"endpoint_{number}_" if len(runs) > 1 else ""
        values |= {prefix + name: value for name, value in values_of(run).items()}
        notes += [f"endpoint {number} is {url}", *document["endpoints"][number - 1]["notes"]]
        notes += [run.client_note] if run.client_note else []
        best = highest.get(url)
        if best is not None:
            notes.append(best.in_words)
            if best.met is not None:
                values[prefix + "highest_rate"] = Value(best.met.rate, "1/s")
    model = Path(document["endpoints"][0]["model"]).name
    name = f"bench-serve-{model}-{document['workload']}"
    return Record.create(name, detect("cpu"), values, notes=notes)
