"""Sampling in Triton: one pass over the logits, a second one for the filters where it is needed,
and small work on what matters in each row.

1. `summarize_kernel` reads the logits once and leaves, for each group of 256 neighbouring entries,
   its largest logit and the sum of its weights.
2. `bracket_kernel`, where a row has a filter, says between which two logits the smallest kept one
   lies. The groups' largest logits and sums bound it: closely for top-k, and for top-p of a
   distribution as peaked as a language model's. For a flat one a sample of the row gives two ends
   that are likely.
3. `sift_kernel` reads the groups that reach the low end again, where they are many, and sums up
   what lies above each end.
4. `finish_kernel` draws, if that is possible without knowing the smallest kept logit any closer: it
   nearly always is, because few entries lie between the ends. If not, the ends come closer: by
   another pass of `sift_kernel` (the few rows concerned only), or among few groups by passes of
   this program. Each answer is the one that the exact smallest kept logit gives.
5. A draw is a group's, then an entry's in it: reference.py's two steps. Greedy rows go the same way
   without noise, so a batch may mix them.

Without filters the last kernel does step 5 only, and with enough rows the first kernel does it
itself.

Rows are contiguous in their last dim; the rows' own stride is free. A NaN counts as +inf, so that a
row that holds one shows it. The host is never asked: shapes and launches depend on the arguments
that are None and on nothing a tensor holds, as a captured graph needs. What a row gives does not
depend on the batch: its sums are made in the same order in every launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.sampling.bracket import FIELDS, bracket_kernel
from ridgeline.kernels.sampling.finish import finish_kernel
from ridgeline.kernels.sampling.reference import (
    ENTRY_STREAM,
    GROUP,
    GROUP_STREAM,
    SMALLEST_TEMPERATURE,
)
from ridgeline.kernels.sampling.sift import sift_kernel
from ridgeline.kernels.sampling.summarize import summarize_kernel
from ridgeline.kernels.sampling.tune_space import SamplingConfig, choose
from ridgeline.kernels.targets import Target, can_wait

MAX_GROUPS = 4096  # a row's groups are held in registers at once: vocabularies up to 1,048,576
PIECES = 8  # programs that sift a row
FEW = 64  # groups that one program searches by itself
LOAD_BYTES = 16  # that a thread loads at once
LANES, FINISH_LANES = 8, 16  # threads that share a group; more of them need fewer registers
SIFT_THREADS = 128  # of a program. These are heuristics until measured


def sample_rows(
    logits_BV: Tensor,
    temperature_B: Tensor,
    seed_B: Tensor,
    position_B: Tensor,
    top_k_B: Tensor | None = None,
    top_p_B: Tensor | None = None,
    min_p_B: Tensor | None = None,
    repetition_B: Tensor | None = None,
    presence_B: Tensor | None = None,
    frequency_B: Tensor | None = None,
    output_counts_BV: Tensor | None = None,
    prompt_seen_BV: Tensor | None = None,
    bias_BV: Tensor | None = None,
    few: int = FEW,
    config: SamplingConfig | None = None,
) -> Tensor:
    """The launcher; arguments and result are reference.py's. A search among up to `few` groups is
    left to the row's last program.
    """
    num_rows, vocab_size = logits_BV.shape
    num_groups = triton.cdiv(vocab_size, GROUP)
    if num_groups > MAX_GROUPS:
        raise UnsupportedError(f"a vocabulary of {vocab_size} is larger than {MAX_GROUPS * GROUP}")
    device = logits_BV.device
    tokens_B = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return tokens_B
    filters = (top_k_B, top_p_B, min_p_B)
    filtered = any(values is not None for values in filters)
    tables = (output_counts_BV, prompt_seen_BV, bias_BV)
    penalties = (repetition_B, presence_B, frequency_B)
    uses = _bits((*tables, *penalties))
    target = target_of(logits_BV)
    if config is None:
        config = choose(num_rows, num_groups, logits_BV.dtype, uses > 0, device, target)
    run = _Run(
        logits=_logits(logits_BV, tables, penalties, temperature_B),
        summaries=tuple(torch.empty(num_rows, num_groups, device=device) for _ in range(2)),
        draw=(seed_B, position_B, tokens_B),
        scratch=_scratch(num_rows, num_groups, device) if filtered else (tokens_B,) * 7,
        uses=uses,
        each=LOAD_BYTES // logits_BV.element_size(),
        groups=max(16, triton.next_power_of_2(num_groups)),
        few=few,
        target=target,
    )
    whole = config.pieces == 1 and not filtered
    run.summarize(config, whole)
    if filtered:
        run.bracket(filters)
    if top_k_B is not None or top_p_B is not None:
        run.sift()
    if top_p_B is not None:
        run.finish(filtered, first=True, last=False)
        run.sift()
    if not whole:
        run.finish(filtered, first=top_p_B is None, last=True)
    return tokens_B


@dataclass(frozen=True)
class _Run:
    """What the kernels of one call share, and how each is launched."""

    logits: tuple[Any, ...]  # the first arguments of all
    summaries: tuple[Tensor, ...]  # of groups: largest logit, sum of weights
    draw: tuple[Tensor, ...]  # seed, position, token
    scratch: tuple[Tensor, ...]  # see `_scratch`
    uses: int
    each: int  # entries a thread loads at once
    groups: int  # a power of two
    few: int
    target: Target

    @property
    def num_rows(self) -> int:
        return self.draw[2].shape[0]

    @property
    def num_threads(self) -> int:
        """Of programs that have a whole row's groups: 128 hold 512 of them at four each, so that
        four such programs fit on an SM and 512 rows run at once on an H200.
        """
        return max(128, min(256, self.groups // 8))

    def summarize(self, config: SamplingConfig, whole: bool) -> None:
        self._launch(
            summarize_kernel,
            self.num_rows * config.pieces,
            (*self.summaries, *self.draw, config.pieces),
            config.num_warps * self.target.warp_size,
            WHOLE=whole,
            TILE=config.tile,
            SEGMENT=LANES * self.each,
            STAGES=config.num_stages,
            **self._streams(),
        )

    def bracket(self, filters: tuple[Tensor | None, ...]) -> None:
        names = ("HAS_TOP_K", "HAS_TOP_P", "HAS_MIN_P")
        self._launch(
            bracket_kernel,
            self.num_rows,
            (
                *self.summaries,
                *(self.scratch[0] if values is None else values for values in filters),
                *self.scratch[:3],
            ),
            self.num_threads,
            self._registers(False),
            GROUPS=self.groups,
            FEW=self.few,
            **{name: values is not None for name, values in zip(names, filters, strict=True)},
        )

    def sift(self) -> None:
        self._launch(
            sift_kernel,
            self.num_rows * PIECES,
            self.scratch[:5],
            SIFT_THREADS,
            SEGMENT=LANES * self.each,
            TILE=SIFT_THREADS // LANES,
            PIECES=PIECES,
            FEW=self.few,
        )

    def finish(self, filtered: bool, *, first: bool, last: bool) -> None:
        self._launch(
            finish_kernel,
            self.num_rows,
            (*self.summaries, *self.draw, *self.scratch),
            self.num_threads,
            self._registers(last),
            FILTERED=filtered,
            SEGMENT=FINISH_LANES * self.each,
            LANES=FINISH_LANES,
            TILE=self.num_threads // FINISH_LANES,
            PIECES=PIECES,
            FEW=self.few,
            FIRST=first,
            LAST=last,
            **self._streams(),
        )

    def _registers(self, last: bool) -> dict[str, int]:
        """What the assembler may give a thread; left to itself it may take a number that many
        threads could have, and spill. With 128, four programs of four warps fit on an SM. Tables of
        penalties take more to hold, and so does a row that is read entry by entry because it is not
        aligned; so do, on some chips, more groups and the last kernel.
        """
        if self.target.backend != "cuda":
            return {}
        logits_BV = self.logits[0]
        aligned = not (logits_BV.shape[1] % 16 or logits_BV.stride(0) % 16)
        if self.uses or not aligned or self.num_threads > 128:
            return {"maxnreg": 255}
        more = (last or self.groups > 512) and self.target.name != "sm_90"
        return {"maxnreg": 255 if more else 128}

    def _streams(self) -> dict[str, Any]:
        return {"GROUPS": self.groups, "GROUP_STREAM": GROUP_STREAM, "ENTRY_STREAM": ENTRY_STREAM}

    def _launch(
        self,
        kernel: Any,
        num_programs: int,
        args: tuple[Any, ...],
        num_threads: int,
        more: dict[str, int] | None = None,
        **constants: Any,
    ) -> None:
        waits = can_wait(self.target)
        launch(
            kernel,
            (num_programs,),
            (*self.logits, *args),
            num_warps=num_threads // self.target.warp_size,
            options={**({"launch_pdl": True} if waits else {}), **(more or {})},
            SMALLEST=SMALLEST_TEMPERATURE,
            USES=self.uses,
            GROUP=GROUP,
            PDL=waits,
            **constants,
        )


def _logits(
    logits_BV: Tensor,
    tables: tuple[Tensor | None, ...],
    penalties: tuple[Tensor | None, ...],
    temperature_B: Tensor,
) -> tuple[Any, ...]:
    """The first arguments of every kernel: what a row's logits are made of, their number."""
    rows = [_rows(table) for table in (logits_BV, *tables)]
    return (
        *(logits_BV if table is None else table for table in rows),
        *(temperature_B if values is None else values for values in penalties),
        *(0 if table is None else table.stride(0) for table in rows),
        logits_BV.shape[1],
        triton.cdiv(logits_BV.shape[1], GROUP),
        temperature_B,
    )


def _scratch(num_rows: int, num_groups: int, device: torch.device) -> tuple[Tensor, ...]:
    """What the filters' kernels hand on: the ends, how many groups are listed, which, what each has
    above the ends, and all; scores of groups, and those that may be drawn.
    """

    def empty(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, columns, dtype=dtype, device=device)

    return (
        empty(FIELDS.value, torch.float32),
        empty(1, torch.int32),
        empty(num_groups, torch.int32),
        empty(2 * num_groups, torch.float32),
        empty(2 * PIECES, torch.float32),
        empty(2 * num_groups, torch.float32),
        empty(num_groups, torch.int32),
    )


def _bits(given: tuple[Tensor | None, ...]) -> int:
    """USES: one bit for each table or penalty that is given, in the order of the constants."""
    return sum(1 << place for place, values in enumerate(given) if values is not None)


def _rows(table_BV: Tensor | None) -> Tensor | None:
    """The last dim contiguous, as the kernels read it; booleans as bytes."""
    if table_BV is None:
        return None
    rows = table_BV if table_BV.stride(-1) == 1 else table_BV.contiguous()
    return rows.view(torch.uint8) if rows.dtype == torch.bool else rows
