"""Near duplicates on a GPU: checked against the references and a CPU, then timed: signatures from
text on the device, and all from text in pinned host memory to verified pairs.

    PYTHONPATH=.:tests python -m minhash_speed --save results
    make gpu-minhash

The text is drawn: words of a vocabulary by Zipf's law, documents of a few kilobytes (some of
hundreds), a seventh of them changed copies of others. `--gib` says how much.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from kernel_checks import check_forward
from torch import Tensor

from ridgeline.data.corpus.duplicates import DuplicateOptions
from ridgeline.data.corpus.duplicates.in_memory import SimilarPairs, similar_pairs
from ridgeline.hardware import detect
from ridgeline.kernels import minhash
from ridgeline.kernels.minhash import triton
from ridgeline.kernels.minhash.triton import DEFAULT, MinHashConfig
from ridgeline.kernels.registry import get_op
from ridgeline.records import Record, Value
from ridgeline.timing import Timing, time_device, time_host

VOCABULARY = 1 << 16
MEAN_WORDS = 800
COPIES = 1 / 7
PIECE_WORDS = 1 << 24  # written at once: a place of eight bytes for each byte of text
CHECKED_BYTES = 48 << 20  # of documents that a CPU goes through too
CONFIGS = (
    DEFAULT,
    *(replace(DEFAULT, bytes=size) for size in (512, 2048)),
    *(replace(DEFAULT, unroll=unroll) for unroll in (4, 16)),
    *(replace(DEFAULT, bytes=256 * warps, warps=warps) for warps in (1, 2, 8)),
)


def drawn_text(num_bytes: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Documents end to end on the device, and where each begins."""
    generator = torch.Generator(device=device).manual_seed(seed)
    letters = torch.randint(97, 123, (VOCABULARY, 12), device=device, generator=generator)
    lengths = torch.randint(1, 12, (VOCABULARY,), device=device, generator=generator)
    sizes, words = drawn_documents(num_bytes // 7, device, generator)
    spelled = letters.to(torch.uint8)
    spelled.scatter_(1, lengths[:, None], 32)  # a space behind each word
    pieces = [
        spelling(spelled, lengths + 1, words[start : start + PIECE_WORDS])
        for start in range(0, len(words), PIECE_WORDS)
    ]
    ends = (lengths + 1)[words].cumsum(0)
    offsets = torch.cat((ends.new_zeros(1), ends[sizes.cumsum(0) - 1]))
    return torch.cat(pieces), offsets


def drawn_documents(
    num_words: int, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Numbers of words of each document, and of the words."""
    count = max(2, num_words // MEAN_WORDS)
    spread = torch.randn(count, device=device, generator=generator)
    sizes = (MEAN_WORDS * torch.exp(spread - 0.5)).long().clamp(min=1)
    uniform = torch.rand(int(sizes.sum()), device=device, generator=generator)
    words = (VOCABULARY**uniform - 1).long()
    is_copy = torch.rand(count, device=device, generator=generator) < COPIES
    source = torch.arange(count, device=device)
    source[1:][is_copy[1:]] -= 1
    starts = sizes.cumsum(0) - sizes
    copied_sizes = sizes[source]
    inside = torch.arange(int(copied_sizes.sum()), device=device)
    inside -= (copied_sizes.cumsum(0) - copied_sizes).repeat_interleave(copied_sizes)
    copied = words[starts[source].repeat_interleave(copied_sizes) + inside]
    # Of a copy's words up to one in twenty is another.
    rate = 0.05 * torch.rand(count, device=device, generator=generator) * is_copy
    changed = torch.rand(len(copied), device=device, generator=generator)
    other = torch.randint(VOCABULARY, (len(copied),), device=device, generator=generator)
    return copied_sizes, torch.where(changed < rate.repeat_interleave(copied_sizes), other, copied)


def spelling(spelled: Tensor, lengths: Tensor, words: Tensor) -> Tensor:
    own = lengths[words]
    shift = (own.cumsum(0) - own).repeat_interleave(own)
    inside = torch.arange(len(shift), device=words.device) - shift
    return spelled[words.repeat_interleave(own), inside]


def first_documents(text_N: Tensor, offsets: Tensor, num_bytes: int) -> tuple[Tensor, Tensor]:
    count = max(1, int((offsets <= num_bytes).sum()) - 1)
    chosen = offsets[: count + 1].contiguous()
    return text_N[: int(chosen[-1])], chosen


def checks(text_N: Tensor, offsets: Tensor, options: DuplicateOptions) -> Iterator[str]:
    """What failed, in a line each."""
    device = text_N.device
    op = get_op("minhash")
    for case in op.cases:
        try:
            check_forward(op, case, device)
        except Exception as error:
            yield f"{case.label}: {type(error).__name__} {str(error).strip()[:200]}"
    few = first_documents(text_N, offsets, CHECKED_BYTES)
    on_host = tuple(each.cpu() for each in few)
    shape = {"bands": options.bands, "rows": options.rows, "ngram": options.ngram}
    expected = minhash.signatures(*on_host, **shape)
    for config in CONFIGS:
        made = triton.signatures(*few, **shape, config=config)
        for name, own, other in zip(expected._fields, made, expected, strict=True):
            if not torch.equal(own.cpu(), other):
                yield f"{config}: {name} of {len(few[1]) - 1} documents differ from the CPU's"
    device_pairs, host_pairs = similar_pairs(*few, options), similar_pairs(*on_host, options)
    for name in ("first", "second", "similarity"):
        if not torch.equal(getattr(device_pairs, name).cpu(), getattr(host_pairs, name)):
            yield f"{name} of the pairs differ from the CPU's"


def rate(num_bytes: int, timing: Timing) -> Value:
    return Value(num_bytes / timing.median_s, "B/s", timing.spread, timing.num_samples)


def line(name: str, value: Value) -> str:
    spread = value.spread or 0.0
    return f"  {name}: {value.value / 1e9:.2f} GB/s (spread {spread:.1%}, {value.num_samples} runs)"


def times(text_N: Tensor, offsets: Tensor, options: DuplicateOptions) -> dict[str, Value]:
    shape = {"bands": options.bands, "rows": options.rows, "ngram": options.ngram}
    device, values = text_N.device, {}

    def signed(config: MinHashConfig) -> Value:
        timing = time_device(
            lambda: triton.signatures(text_N, offsets, **shape, config=config), device=device
        )
        return rate(len(text_N), timing)

    for config in CONFIGS:
        name = f"signatures {config.bytes} bytes, {config.warps} warps, {config.unroll} at once"
        values[name] = signed(config)
        print(line(name, values[name]), flush=True)
    places = triton.shingle_places(text_N, offsets, ngram=options.ngram)
    values["shingles alone"] = rate(
        len(text_N),
        time_device(
            lambda: triton.shingle_places(text_N, offsets, ngram=options.ngram), device=device
        ),
    )
    values["minima alone"] = rate(
        len(text_N),
        time_device(
            lambda: triton.minima(places, bands=options.bands, rows=options.rows), device=device
        ),
    )
    host = text_N.cpu().pin_memory(), offsets.cpu().pin_memory()
    results: list[SimilarPairs] = []

    def whole() -> None:
        on_device = (each.to(device, non_blocking=True) for each in host)
        results[:] = [similar_pairs(*on_device, options)]

    values["from host memory to verified pairs"] = rate(
        len(text_N), time_host(whole, device=device)
    )
    for name in ("shingles alone", "minima alone", "from host memory to verified pairs"):
        print(line(name, values[name]), flush=True)
    pairs = results[0]
    print(f"  {pairs.num_candidates} candidates, {len(pairs.first)} near duplicates")
    return values


def main() -> int:
    parser = argparse.ArgumentParser(prog="minhash_speed", description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="of text (default: %(default)s)")
    parser.add_argument("--save", type=Path, help="folder for the record")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("signatures are checked and timed on a GPU, and none was found")
    device, options = torch.device("cuda:0"), DuplicateOptions()
    text_N, offsets = drawn_text(int(args.gib * 2**30), device)
    print(
        f"{len(text_N) / 1e9:.2f} GB, {len(offsets) - 1} documents; "
        f"{options.bands} bands of {options.rows} rows"
    )
    failed = list(checks(text_N, offsets, options))
    print(f"checks: {len(failed)} failed")
    for text in failed:
        print(f"  FAILED {text}")
    values = times(text_N, offsets, options)
    if args.save is not None and not failed:
        record = Record.create(
            "minhash", detect("cuda:0"), values, ("minhash_speed", *sys.argv[1:])
        )
        print(record.save(args.save))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
