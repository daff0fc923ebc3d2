"""Which projections a scheme fits, and a similar scheme that fits more of them: rows of 576 weights
do not divide into groups of 128, but into groups of 64.

    fit = scheme_fit(dict(named_matrices(config)), parse_scheme("int4-g128"))
    if fit.unfit: print(fit.in_words())
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ridgeline.quantization.scheme import BLOCK, GROUPS, Scheme, parse_scheme
from ridgeline.quantization.sizes import MatrixSize


@dataclass(frozen=True)
class SchemeFit:
    scheme: str
    num_projections: int  # that were to be quantized
    unfit: tuple[str, ...]  # those that cannot be
    row_lengths: tuple[int, ...]  # of these
    proposal: str | None  # a scheme that fits more; None: all fit
    num_proposed: int  # projections that the proposal fits

    def in_words(self) -> str:
        """`int4-g128 does not fit 90 of 120 projections (layers.0.attn.qkv …), whose rows of 576
        weights do not divide by 128: they are not quantized; int4-g64 fits all 120`.
        """
        return (
            f"{self.scheme} does not fit {len(self.unfit)} of {self.num_projections} projections "
            f"({self.unfit[0]} …), whose {self.rows}: they are not quantized; {self.better}"
        )

    @property
    def rows(self) -> str:
        lengths = " or ".join(map(str, self.row_lengths))
        scheme = parse_scheme(self.scheme)
        if scheme.spread == "group":
            return f"rows of {lengths} weights do not divide by {scheme.group}"
        return f"rows or columns do not divide by {BLOCK}"

    @property
    def better(self) -> str:
        every = self.num_proposed == self.num_projections
        return f"{self.proposal} fits {'all ' if every else ''}{self.num_proposed}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"message": self.in_words()}


def scheme_fit(matrices: Mapping[str, MatrixSize], scheme: Scheme) -> SchemeFit:
    """`matrices` are those that are to be quantized."""
    unfit = tuple(name for name, matrix in matrices.items() if not scheme.fits(*matrix))
    lengths = tuple(sorted({matrices[name].depth for name in unfit}))
    better = None if not unfit else _better(matrices, scheme)
    num = 0 if better is None else num_fitting(matrices, better)
    name = None if better is None else better.name
    return SchemeFit(scheme.name, len(matrices), unfit, lengths, name, num)


def num_fitting(matrices: Mapping[str, MatrixSize], scheme: Scheme) -> int:
    return sum(scheme.fits(*matrix) for matrix in matrices.values())


def _better(matrices: Mapping[str, MatrixSize], scheme: Scheme) -> Scheme:
    """The largest groups that fit most; where no groups fit more, a scale for each row."""
    if scheme.spread != "group":
        return parse_scheme("fp8" if scheme.weight == "fp8" else "int8")
    suffix = "" if scheme.symmetric else "-asym"
    smaller = [
        parse_scheme(f"int4-g{group}{suffix}")
        for group in sorted(GROUPS, reverse=True)
        if group < scheme.group
    ]
    best = max([scheme, *smaller], key=lambda each: num_fitting(matrices, each))
    return parse_scheme("int8") if best is scheme else best
