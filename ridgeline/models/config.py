"""ModelConfig: the shape of a model, whatever file it came from. The families read it; costs are
computed from it.

A family names and fills these fields and is not a model class: one transformer is built from them
(transformer.py), so the engine, the kernels and the cost accounting handle each feature once.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.errors import ConfigError
from ridgeline.kernels.gated_activation import Activation
from ridgeline.models.rope import RopeConfig


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture-of-experts MLP of a layer."""

    num_experts: int
    experts_per_token: int
    mlp_size: int  # of one expert
    renormalize: bool  # the chosen experts' weights are rescaled to sum to one
    held: int | None = None  # experts that this device has, where ranks share them; None: all

    @property
    def num_held(self) -> int:
        return self.num_experts if self.held is None else self.held

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"{self.experts_per_token} experts per token, but there are "
                f"{self.num_experts} experts; "
                "it must be between 1 and all of them"
            )


@dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer."""

    rope: RopeConfig | None  # None: no rotary embedding in this layer
    window: int | None  # sliding attention window in tokens, itself included; None: full attention
    experts: ExpertsConfig | None = None  # None: the dense MLP


@dataclass(frozen=True)
class ModelConfig:
    family: str  # the name of the file in models/families that read it
    vocab_size: int
    hidden_size: int
    num_heads: int  # query heads
    num_kv_heads: int  # key-value heads; each serves num_heads / num_kv_heads query heads
    head_dim: int
    mlp_size: int  # of the dense MLP
    max_context: int  # tokens
    layers: tuple[LayerConfig, ...]
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # added to every norm's weight: 1 for Gemma
    activation: Activation = "silu"
    tied_embeddings: bool = False  # the output head is the embedding table
    qkv_bias: bool = False
    out_bias: bool = False  # bias of attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each query and key head before the rotation
    post_norms: bool = False  # norms after attention and MLP too, before the residual is added
    attention_scale: float = 0.0  # scores are q·k times this; 0: 1 / sqrt(head_dim)
    attention_softcap: float | None = None
    final_softcap: float | None = None  # logits become cap · tanh(logit / cap)
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # what each block's output is multiplied by before it is added
    logit_scale: float = 1.0  # what the logits are multiplied by

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "mlp_size",
            "max_context",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.layers:
            raise ConfigError("the model has no layers")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key-value heads"
            )
        if any(layer.rope and layer.rope.rotary_dim > self.head_dim for layer in self.layers):
            raise ConfigError(f"more dims are rotated than a head has: {self.head_dim}")
        if any(layer.window is not None and layer.window < 1 for layer in self.layers):
            raise ConfigError("a sliding window must be at least 1 token")
        for name in ("attention_softcap", "final_softcap"):
            cap = getattr(self, name)
            if cap is not None and cap <= 0:
                raise ConfigError(f"{name} is {cap}; it must be positive")
        if self.norm_eps < 0:
            raise ConfigError(f"norm_eps is {self.norm_eps}; it must not be negative")
        if not self.attention_scale:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
