"""Rotary frequencies: all the ways in which checkpoints stretch them, read and computed in
one place.

`RopeConfig` says how; `RopeConfig.angles(positions, lengths)` gives the cosines and sines for a
step. Two types (`dynamic`, `longrope`) depend on how long the sequence is: a token computed with
its prompt uses the prompt's length, a token generated later uses its own position + 1, so that the
result does not depend on how a prompt was cut into chunks. Letters: T tokens, A angles (half the
rotated dims).

    cos_TA, sin_TA = config.rope.angles(positions_T, lengths_T)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ridgeline.errors import ConfigError, UnsupportedError, near_matches

RopeType = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]
_LARGEST = 1e30  # far beyond any real figure, and safe to multiply
_OLD_NAMES = {"su": "longrope"}  # what the first Phi-3 checkpoints called it


@dataclass(frozen=True)
class RopeConfig:
    theta: float  # base of the geometric series of wavelengths
    rotary_dim: int  # how many of a head's dims are rotated
    type: RopeType = "default"
    factor: float = 1.0  # how many times longer the context was made
    original_context: int = 0  # tokens; the context before it was stretched
    attention_factor: float = 1.0  # multiplies cosines and sines (yarn, longrope)
    beta_fast: float = (
        32.0  # yarn: dims that turn more often than this in a context stay as they are
    )
    beta_slow: float = 1.0  # yarn: dims that turn less often than this are stretched fully
    truncate: bool = True  # yarn: round the two bounds to whole dims
    low_freq_factor: float = 1.0  # llama3: wavelengths above original_context / this are stretched
    high_freq_factor: float = 4.0  # llama3: wavelengths below original_context / this stay
    short_factor: tuple[float, ...] = ()  # longrope: divisor per angle up to original_context
    long_factor: tuple[float, ...] = ()  # longrope: divisor per angle past original_context

    def __post_init__(self) -> None:
        if self.rotary_dim <= 0 or self.rotary_dim % 2:
            raise ConfigError(f"rotary_dim is {self.rotary_dim}; it must be even and positive")
        if self.theta <= 1 or self.factor <= 0:
            raise ConfigError(
                f"rope theta {self.theta} and factor {self.factor} must be above 1 and 0"
            )
        if self.beta_fast <= 0 or self.beta_slow <= 0:
            raise ConfigError(
                f"rope betas {self.beta_fast} and {self.beta_slow}: both must be positive"
            )
        if self.type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"rope low_freq_factor {self.low_freq_factor} must be below "
                f"high_freq_factor {self.high_freq_factor}"
            )
        if self.type == "dynamic" and self.rotary_dim == 2:
            raise ConfigError("rope type 'dynamic' needs more than 2 rotated dims")
        if any(factor <= 0 for factor in (*self.short_factor, *self.long_factor)):
            raise ConfigError("a longrope factor is not positive")
        if self.type not in ("default", "linear") and self.original_context <= 0:
            raise ConfigError(f"rope type {self.type!r} needs original_max_position_embeddings")
        num_angles = self.rotary_dim // 2
        if (
            self.type == "longrope"
            and not len(self.short_factor) == len(self.long_factor) == num_angles
        ):
            raise ConfigError(
                f"longrope has {len(self.short_factor)} and {len(self.long_factor)} factors; "
                f"{self.rotary_dim} rotated dims need {num_angles} of each"
            )

    def angles(self, positions_T: Tensor, lengths_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos_TA and sin_TA in fp32. `lengths_T`: see the head of this file; read by two types
        only.
        """
        frequencies = self._frequencies(lengths_T)
        angles_TA = positions_T.float().unsqueeze(1) * frequencies
        return angles_TA.cos() * self.attention_factor, angles_TA.sin() * self.attention_factor

    def _frequencies(self, lengths_T: Tensor) -> Tensor:
        """Radians a position: [A], or [T, A] where the sequence's length matters."""
        device = lengths_T.device
        exponent_A = torch.arange(0, self.rotary_dim, 2, device=device).float() / self.rotary_dim
        if self.type == "dynamic":
            return self._dynamic(exponent_A, lengths_T)
        plain_A = 1.0 / self.theta**exponent_A
        if self.type == "linear":
            return plain_A / self.factor
        if self.type == "yarn":
            return self._yarn(plain_A)
        if self.type == "llama3":
            return self._llama3(plain_A)
        if self.type == "longrope":
            is_long_T1 = (lengths_T > self.original_context).unsqueeze(1)
            long_A = torch.tensor(self.long_factor, device=device)
            return plain_A / torch.where(
                is_long_T1, long_A, torch.tensor(self.short_factor, device=device)
            )
        return plain_A

    def _dynamic(self, exponent_A: Tensor, lengths_T: Tensor) -> Tensor:
        stretch_T = lengths_T.clamp(min=self.original_context).float() / self.original_context
        power = self.rotary_dim / (self.rotary_dim - 2)
        theta_T = self.theta * (self.factor * stretch_T - (self.factor - 1)) ** power
        return 1.0 / theta_T.unsqueeze(1) ** exponent_A

    def _yarn(self, plain_A: Tensor) -> Tensor:
        low, high = self._turning_dim(self.beta_fast), self._turning_dim(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        width = (high - low) or 0.001
        index_A = torch.arange(plain_A.shape[0], device=plain_A.device).float()
        stretched_A = ((index_A - low) / width).clamp(0, 1)
        return plain_A / self.factor * stretched_A + plain_A * (1 - stretched_A)

    def _turning_dim(self, turns: float) -> float:
        """The (fractional) angle index that turns this many times within the original context."""
        wavelength = self.original_context / (turns * 2 * math.pi)
        return self.rotary_dim * math.log(wavelength) / (2 * math.log(self.theta))

    def _llama3(self, plain_A: Tensor) -> Tensor:
        wavelength_A = 2 * math.pi / plain_A
        turns_A = self.original_context / wavelength_A
        span = self.high_freq_factor - self.low_freq_factor
        kept_A = ((turns_A - self.low_freq_factor) / span).clamp(0, 1)
        return (1 - kept_A) * plain_A / self.factor + kept_A * plain_A

    def usable_context(self, max_context: int) -> int:
        """Tokens the stretched rope reaches, where max_position_embeddings is the unstretched."""
        if self.type in ("linear", "dynamic"):
            return int(max_context * self.factor)
        if self.type == "yarn":
            return max(max_context, int(self.original_context * self.factor))
        return max_context


def rope_from_hf(
    parameters: Mapping[str, Any],
    *,
    theta: float,
    head_dim: int,
    max_context: int,
    original_context: int | None = None,
    partial_rotary_factor: float = 1.0,
) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_scaling` (before); the rest are the config's
    own fields.
    """
    rope_type = _rope_type(parameters)
    fraction = _number(parameters, "partial_rotary_factor", partial_rotary_factor)
    original = original_context or int(
        _number(parameters, "original_max_position_embeddings", 0) or max_context
    )
    if original < 2:
        raise ConfigError(f"rope: the original context is {original} tokens; expected at least 2")
    if rope_type == "dynamic":
        original = max_context  # transformers reads max_position_embeddings here and nothing else
    if parameters.get("factor") is None and rope_type in ("linear", "dynamic", "llama3"):
        raise ConfigError(f"rope type {rope_type!r} needs a factor, which the config does not give")
    factor = _number(parameters, "factor", max_context / original)
    return RopeConfig(
        theta=_number(parameters, "rope_theta", theta),
        rotary_dim=int(head_dim * fraction),
        type=rope_type,
        factor=factor if rope_type != "default" else 1.0,
        original_context=original,
        attention_factor=_attention_factor(parameters, rope_type, factor, original),
        beta_fast=_number(parameters, "beta_fast", 32.0) or 32.0,
        beta_slow=_number(parameters, "beta_slow", 1.0) or 1.0,
        truncate=bool(parameters.get("truncate", True)),
        low_freq_factor=_number(parameters, "low_freq_factor", 1.0),
        high_freq_factor=_number(parameters, "high_freq_factor", 4.0),
        short_factor=_numbers(parameters, "short_factor"),
        long_factor=_numbers(parameters, "long_factor"),
    )


def _rope_type(parameters: Mapping[str, Any]) -> RopeType:
    name = parameters.get("rope_type", parameters.get("type", "default"))
    for known in get_args(RopeType):
        if name == known or (isinstance(name, str) and _OLD_NAMES.get(name) == known):
            rope_type: RopeType = known
            return rope_type
    supported = get_args(RopeType)
    hint = near_matches(str(name), supported)
    raise UnsupportedError(
        f"rope type {str(name)[:80]!r} is not supported; supported: {', '.join(supported)}{hint}"
    )


def _number(parameters: Mapping[str, Any], name: str, default: float) -> float:
    """A finite number; the default where the config is silent or says null."""
    value = parameters.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) < _LARGEST:
        raise ConfigError(f"rope: {name} is {repr(value)[:80]}; expected a number")
    return float(value)


def _numbers(parameters: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = parameters.get(name) or []
    if not isinstance(values, list | tuple):
        raise ConfigError(f"rope: {name} is {repr(values)[:80]}; expected a list of numbers")
    return tuple(_number({name: value}, name, math.nan) for value in values)


def _attention_factor(
    parameters: Mapping[str, Any], rope_type: str, factor: float, original: int
) -> float:
    """What cosines and sines are multiplied by, as the yarn and LongRoPE papers set it when the
    config does not.
    """
    if parameters.get("attention_factor") is not None and rope_type in ("yarn", "longrope"):
        return _number(parameters, "attention_factor", 1.0)
    if rope_type == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    if rope_type == "yarn":
        mscale, mscale_all = (
            _number(parameters, name, 0.0) for name in ("mscale", "mscale_all_dim")
        )
        if mscale > 0 and mscale_all > 0:
            return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
        return _yarn_mscale(factor, 1.0)
    return 1.0


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
