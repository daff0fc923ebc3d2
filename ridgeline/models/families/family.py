"""What a model family is, and what its files share: reading `config.json` fields with errors that
name them.

A family reads a `config.json` into a ModelConfig and gives the names of its tensors. GGUF metadata
is first converted to the `config.json` the model would have had (gguf.py here), so each fact about
a family is read in one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ridgeline.errors import ConfigError, UnsupportedError
from ridgeline.kernels.gated_activation import Activation
from ridgeline.models.config import LayerConfig, ModelConfig
from ridgeline.models.families.names import HF_NAMES, GgufForm, Names
from ridgeline.models.rope import RopeConfig, rope_from_hf

Value = TypeVar("Value", int, float, bool)
Number = TypeVar("Number", int, float)

MAX_LAYERS = 1024  # the deepest released models have about 130
MAX_WHOLE = 2**53  # what any JSON reader still counts exactly

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


class ConfigFields:
    """A `config.json` with the file's name for error messages and checks of presence and type."""

    def __init__(self, values: Mapping[str, Any], origin: str = "config.json") -> None:
        self.values = values
        self.origin = origin

    def required(self, name: str, kind: type[Value]) -> Value:
        if self.values.get(name) is None:
            raise ConfigError(f"{self.origin} has no field {name!r}, which this model needs")
        return self._checked(name, self.values[name], kind)

    def optional(self, name: str, kind: type[Value]) -> Value | None:
        value = self.values.get(name)
        return None if value is None else self._checked(name, value, kind)

    def get(self, name: str, default: Value) -> Value:
        value = self.optional(name, type(default))
        return default if value is None else value

    def positive(self, name: str, kind: type[Number], default: Number | None = None) -> Number:
        """A number above zero; required where there is no default."""
        value = self.optional(name, kind)
        if value is None:
            value = self.required(name, kind) if default is None else default
        if value <= 0:
            raise ConfigError(f"{self.origin}: {name} is {value}; it must be positive")
        return value

    def num_layers(self) -> int:
        """Checked before anything is made once a layer."""
        count = self.positive("num_hidden_layers", int)
        if count > MAX_LAYERS:
            raise ConfigError(
                f"{self.origin}: num_hidden_layers is {count}; at most {MAX_LAYERS} are supported"
            )
        return count

    def _checked(self, name: str, value: Any, kind: type[Value]) -> Value:
        if not fits(value, kind):
            what = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
            raise ConfigError(f"{self.origin}: {name} is {short(value)}; expected {what}")
        return kind(value)

    def mapping(self, *names: str) -> Mapping[str, Any]:
        """The first of these fields that holds an object; empty when none does."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                if not isinstance(value, Mapping):
                    raise ConfigError(
                        f"{self.origin}: {name} is {short(value)}; expected an object"
                    )
                return value
        return {}

    def strings(self, name: str, length: int) -> list[str] | None:
        value = self.values.get(name)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or len(value) != length
            or not all(isinstance(v, str) for v in value)
        ):
            raise ConfigError(
                f"{self.origin}: {name} should be a list of {length} strings, one a layer"
            )
        return value


def fits(value: Any, kind: type) -> bool:
    """Whether a JSON value is of this kind; whole numbers may be written 4096.0."""
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if not isinstance(value, int | float) or not abs(value) < math.inf:
        return False
    return abs(value) <= MAX_WHOLE and value == int(value) if kind is int else abs(value) < 1e300


def short(value: Any) -> str:
    """A value from someone's file, for an error line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


@dataclass(frozen=True)
class Family:
    name: str
    architectures: tuple[str, ...]  # what `architectures` in config.json says; the first is written
    config: Callable[[ConfigFields], ModelConfig]
    model_type: str = ""  # written to config.json; default: the name
    hf_names: Names = HF_NAMES
    gguf: GgufForm | None = None  # None: there are no GGUF files of it
    renamed: tuple[tuple[str, str], ...] = ()  # (prefix in some checkpoints, prefix in hf_names)
    ignored: tuple[str, ...] = ()  # prefixes of tensors outside the language model

    def __post_init__(self) -> None:
        object.__setattr__(self, "model_type", self.model_type or self.name)


def decoder_config(
    fields: ConfigFields,
    family: str,
    *,
    tied_embeddings: bool = False,
    head_dim: int | None = None,
    rope_theta: float = 10000.0,
    original_context: int | None = None,
    windows: Iterable[int | None] | None = None,
    context_is_stretched: bool = False,
    **features: Any,
) -> ModelConfig:
    """What nearly all families share. The keyword arguments before `features` are what the family's
    own configuration class takes when config.json is silent; `features` are fields of ModelConfig.
    """
    num_heads = fields.positive("num_attention_heads", int)
    hidden_size = fields.positive("hidden_size", int)
    num_layers = fields.num_layers()
    size = head_size(fields, head_dim, hidden_size, num_heads)
    max_context = fields.positive("max_position_embeddings", int)
    rope = rope_from_hf(
        fields.mapping("rope_parameters", "rope_scaling"),
        theta=fields.get("rope_theta", rope_theta),
        head_dim=size,
        max_context=max_context,
        original_context=fields.optional("original_max_position_embeddings", int)
        or original_context,
        partial_rotary_factor=fields.get("partial_rotary_factor", 1.0),
    )
    layers = tuple(LayerConfig(rope, window) for window in windows or [None] * num_layers)
    return ModelConfig(
        family=family,
        vocab_size=fields.positive("vocab_size", int),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.positive("num_key_value_heads", int, num_heads),
        head_dim=size,
        mlp_size=fields.positive("intermediate_size", int),
        max_context=max_context if context_is_stretched else rope.usable_context(max_context),
        layers=layers,
        norm_eps=fields.get("rms_norm_eps", 1e-6),
        activation=activation(fields),
        tied_embeddings=fields.get("tie_word_embeddings", tied_embeddings),
        **features,
    )


def attention_biases(fields: ConfigFields) -> dict[str, Any]:
    """Biases of all of attention's projections, where `attention_bias` asks for them."""
    has_bias = fields.get("attention_bias", False)
    return {"qkv_bias": has_bias, "out_bias": has_bias}


def head_size(fields: ConfigFields, default: int | None, hidden_size: int, num_heads: int) -> int:
    if default is None and fields.optional("head_dim", int) is None and hidden_size % num_heads:
        raise ConfigError(
            f"{fields.origin}: hidden_size {hidden_size} is not a multiple of "
            f"num_attention_heads {num_heads}, and there is no head_dim"
        )
    return fields.positive("head_dim", int, default or hidden_size // num_heads)


def activation(fields: ConfigFields) -> Activation:
    name = fields.values.get("hidden_activation") or fields.values.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedError(
            f"activation {short(name)} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def windows_by_type(
    fields: ConfigFields, window: int | None, otherwise: Callable[[int], bool]
) -> list[int | None]:
    """One window a layer: by `layer_types` where the config has it, else by `otherwise(layer)`."""
    num_layers = fields.num_layers()
    types = fields.strings("layer_types", num_layers)
    if types is None:
        return [window if otherwise(i) else None for i in range(num_layers)]
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown:
        raise UnsupportedError(
            f"layer types {short(sorted(unknown))}: only full_attention and sliding_attention "
            "are supported"
        )
    return [window if kind == "sliding_attention" else None for kind in types]


def with_ropes(config: ModelConfig, ropes: Iterable[RopeConfig | None]) -> ModelConfig:
    """The same model with another rope (or none) for each layer."""
    layers = tuple(
        replace(layer, rope=rope) for layer, rope in zip(config.layers, ropes, strict=True)
    )
    return replace(config, layers=layers)
