"""The one model definition: a decoder over packed tokens, built from a ModelConfig.

Written as if for one device and one precision; quantization, parallelism and recomputation are
applied from outside. It keeps no cache: what attention needs of the sequences arrives as an
argument, the `Sequences` of a step.

Letters: T tokens of all sequences end to end, R rows that want logits, D hidden size, N query
heads, K key-value heads, H head dim, A rotary angles, F MLP size, V vocabulary.

    hidden_TD = model(tokens_T, sequences)
    logits_RV = model.logits(hidden_TD[last_rows])

Each projection is given the norm before it and the activation and residual after it (`Fusion`), so
that a GPU can run all of them in one kernel; elsewhere they run one after the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ridgeline.kernels.attention import AttentionSpec
from ridgeline.kernels.gated_activation import Activation, gated_activation
from ridgeline.kernels.moe import mixture_of_experts, route
from ridgeline.kernels.rms_norm import rms_norm
from ridgeline.kernels.rotary import Angles, rotate
from ridgeline.kernels.skinny_linear import MAX_ROWS, skinny_linear
from ridgeline.kernels.skinny_linear.fused import FusedParts
from ridgeline.models.config import ExpertsConfig, LayerConfig, ModelConfig
from ridgeline.models.rope import RopeConfig
from ridgeline.products import linear

RopeAngles = dict[RopeConfig, tuple[Tensor, Tensor]]


class Sequences(Protocol):
    """The sequences a step works on: where its tokens stand, and attention over everything before
    them.
    """

    @property
    def positions_T(self) -> Tensor:
        """Each token's position in its own sequence."""

    @property
    def lengths_T(self) -> Tensor:
        """The sequence length that picks each token's rotary frequencies (see models/rope.py)."""

    def attend(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: AttentionSpec
    ) -> Tensor:
        """Keep k and v for later steps, and return attention's output [T, N, H]."""


class ProjectedSequences(ABC):
    """Sequences that take the raw projection, and norm, rotate and store it in one pass."""

    @abstractmethod
    def take_embeddings(self) -> Tensor:
        """The tokens' embeddings [T, D], where they are looked up together with the rest of a step.
        Can be taken once, and **the model may change them in place**.
        """

    @abstractmethod
    def angles(self, rope: RopeConfig) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, A] of the step's tokens."""

    @abstractmethod
    def attend_projected(self, layer: Attention, qkv_TC: Tensor, angles: Angles | None) -> Tensor:
        """Norm and rotate the heads of `qkv_TC` as the layer specifies, store k and v for later
        steps, and return attention's output [T, N, H].
        """


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset)


class ResidualStream:
    """The residual stream with an update that is not added yet. The next norm can add it in its own
    pass, which saves reading and writing both once more.
    """

    def __init__(self, x_TD: Tensor, update_TD: Tensor | None = None) -> None:
        self.x_TD = x_TD
        self.update_TD = update_TD

    def total(self) -> Tensor:
        if self.update_TD is not None:
            self.x_TD, self.update_TD = self.update_TD + self.x_TD, None
        return self.x_TD

    def rounded(self, norm: RMSNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The sum after the norm that adds it, as codes with one scale per row."""
        assert self.update_TD is not None, "nothing to add"
        codes_TD, scale_T, self.x_TD = rms_norm(
            self.update_TD, norm.weight, norm.eps, norm.offset, self.x_TD, dtype
        )
        self.update_TD = None
        return codes_TD, scale_T


class Fusion(NamedTuple):
    """What a projection computes besides its product."""

    norm: RMSNorm | None = None  # of its input
    activation: Activation | None = None  # of its output
    residual: Any = None  # [T, O], added last; or a `ResidualStream` (late_sums.py)
    out: Tensor | None = None  # [T, O], where the result is written


class Projection(nn.Module):
    """A linear layer with what is fused with it. Each kind has its own `project`."""

    def forward(
        self,
        x_TD: Any,
        norm: RMSNorm | None = None,
        activation: Activation | None = None,
        residual_TO: Any = None,
        out_TO: Tensor | None = None,
    ) -> Any:
        """`activation(norm(x) @ weightᵀ + bias) + residual`."""
        return self.project(x_TD, Fusion(norm, activation, residual_TO, out_TO))

    def project(self, x_TD: Any, fusion: Fusion) -> Any:
        raise NotImplementedError


class Linear(Projection, nn.Linear):
    def project(self, x_TD: Tensor, fusion: Fusion) -> Tensor:
        return projected(x_TD, self.weight, self.bias, fusion)


def fused_parts(bias_O: Tensor | None, fusion: Fusion) -> FusedParts:
    """What is fused with a product, as the kernels take it."""
    norm, activation, residual_TO, _ = fusion
    if norm is None:
        return FusedParts(bias_O, residual_TO, activation=activation)
    return FusedParts(bias_O, residual_TO, norm.weight, norm.eps, norm.offset, activation)


def projected(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, fusion: Fusion) -> Tensor:
    """`activation(norm(x) @ weightᵀ + bias) + residual`. **The residual may be changed in place**
    on a GPU where no gradient is needed: cuBLAS then adds it for free. Only a plain product can be
    written to `out`, which has the weight's dtype.
    """
    norm, activation, residual_TO, out_TO = fusion
    on_gpu = x_TD.is_cuda and not torch.is_grad_enabled()
    if on_gpu and x_TD.shape[0] <= MAX_ROWS and x_TD.dtype == torch.bfloat16:
        return skinny_linear(x_TD, weight_OD, fused_parts(bias_O, fusion), out_TO)
    if norm is not None:
        x_TD = norm(x_TD)
    if out_TO is not None:
        assert (bias_O, activation, residual_TO) == (None, None, None), "a plain product"
        return linear(x_TD, weight_OD, out=out_TO)
    if on_gpu and residual_TO is not None and bias_O is None:
        return residual_TO.addmm_(x_TD, weight_OD.t())
    y_TO = linear(x_TD, weight_OD, bias_O)
    if activation is not None:
        y_TO = gated_activation(y_TO, activation)
    return y_TO if residual_TO is None else residual_TO + y_TO


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.head_dim = config.head_dim
        self.sizes = (config.q_size, config.kv_size, config.kv_size)
        self.rope = config.layers[index].rope
        self.spec = AttentionSpec(
            config.attention_scale, config.layers[index].window, config.attention_softcap
        )
        self.qkv = Linear(config.hidden_size, sum(self.sizes), bias=config.qkv_bias)
        self.out = Linear(config.q_size, config.hidden_size, bias=config.out_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps, config.norm_offset)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps, config.norm_offset)

    def forward(
        self,
        x_TD: Tensor | ResidualStream,
        norm: RMSNorm,
        angles: RopeAngles,
        sequences: Sequences | ProjectedSequences,
        residual_TD: Tensor | ResidualStream | None = None,
    ) -> Any:
        """With a `ResidualStream` as residual, a `ResidualStream`."""
        qkv_TC = self.qkv(x_TD, norm)
        turns = None if self.rope is None else angles[self.rope]
        if isinstance(sequences, ProjectedSequences):
            out_TNH = sequences.attend_projected(self, qkv_TC, turns)
        else:
            out_TNH = sequences.attend(self.index, *self.heads(qkv_TC, turns), self.spec)
        return self.out(out_TNH.flatten(1), residual_TO=residual_TD)

    def heads(self, qkv_TC: Tensor, turns: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """q_TNH, k_TKH and v_TKH, normed and rotated."""
        q, k, v = qkv_TC.split(self.sizes, dim=-1)
        q_TNH, k_TKH, v_TKH = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q_TNH, k_TKH = self.q_norm(q_TNH), self.k_norm(k_TKH)
        if turns is not None:
            cos_TA, sin_TA = turns
            q_TNH, k_TKH = rotate(q_TNH, cos_TA, sin_TA), rotate(k_TKH, cos_TA, sin_TA)
        return q_TNH, k_TKH, v_TKH


class DenseMLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate_up = Linear(config.hidden_size, 2 * config.mlp_size, bias=config.mlp_bias)
        self.down = Linear(config.mlp_size, config.hidden_size, bias=config.mlp_bias)

    def forward(
        self,
        x_TD: Tensor | ResidualStream,
        norm: RMSNorm,
        residual_TD: Tensor | ResidualStream | None = None,
    ) -> Any:
        """With a `ResidualStream` as residual, a `ResidualStream`."""
        inner_TF = self.gate_up(x_TD, norm, self.activation)
        return self.down(inner_TF, residual_TO=residual_TD)


class ExpertMLP(nn.Module):
    def __init__(self, config: ModelConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.experts_per_token = experts.experts_per_token
        self.renormalize = experts.renormalize
        size, hidden = experts.mlp_size, config.hidden_size
        self.router = Linear(hidden, experts.num_experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(experts.num_held, 2 * size, hidden))
        self.down = nn.Parameter(torch.empty(experts.num_held, hidden, size))

    def forward(self, x_TD: Tensor, norm: RMSNorm, residual_TD: Tensor | None = None) -> Tensor:
        out_TD = self.routed(norm(x_TD))
        return out_TD if residual_TD is None else residual_TD + out_TD

    def routed(self, x_TD: Tensor) -> Tensor:
        """What each token's experts make of it."""
        weights_TA, experts_TA = route(self.router(x_TD), self.experts_per_token, self.renormalize)
        own_TA = self.own_numbers(experts_TA)
        return mixture_of_experts(
            x_TD, weights_TA, own_TA, self.gate_up, self.down, self.activation, self.is_part
        )

    @property
    def is_part(self) -> bool:
        """Whether other devices have more experts."""
        return len(self.down) < self.router.out_features

    def own_numbers(self, experts_TA: Tensor) -> Tensor:
        """Of the chosen experts, as they lie here."""
        return experts_TA


def block_norm(config: ModelConfig) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)


class Block(nn.Module):
    """One layer: attention, then MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        layer: LayerConfig = config.layers[index]
        self.residual_scale = config.residual_scale
        self.attn_norm = block_norm(config)
        self.attn = Attention(config, index)
        self.attn_post_norm = block_norm(config) if config.post_norms else None
        self.mlp_norm = block_norm(config)
        self.mlp = ExpertMLP(config, layer.experts) if layer.experts else DenseMLP(config)
        self.mlp_post_norm = block_norm(config) if config.post_norms else None

    def forward(
        self, x_TD: Any, angles: RopeAngles, sequences: Sequences | ProjectedSequences
    ) -> Any:
        """From a `ResidualStream` a `ResidualStream`, else from tensor to tensor."""
        if self.attn_post_norm is None and self.residual_scale == 1.0:
            x_TD = self.attn(x_TD, self.attn_norm, angles, sequences, residual_TD=x_TD)
            return self.mlp(x_TD, self.mlp_norm, residual_TD=x_TD)
        # Unnamed: a variable would keep the update in memory through the MLP.
        x_TD = self._add(
            x_TD, self.attn(x_TD, self.attn_norm, angles, sequences), self.attn_post_norm
        )
        return self._add(x_TD, self.mlp(x_TD, self.mlp_norm), self.mlp_post_norm)

    def _add(self, x_TD: Tensor, update_TD: Tensor, post_norm: RMSNorm | None) -> Tensor:
        if post_norm is not None:
            update_TD = post_norm(update_TD)
        if self.residual_scale != 1.0:
            update_TD = update_TD * self.residual_scale
        return x_TD + update_TD


class Transformer(nn.Module):
    adds_late = False  # all projections take a `ResidualStream`, and are faster for it

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        # Given a table, or it would draw one, for which torch imports its compiler: a second.
        shape = config.vocab_size, config.hidden_size
        self.embed = nn.Embedding(*shape, _weight=torch.empty(*shape))
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_layers))
        self.norm = block_norm(config)
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, tokens_T: Tensor | None, sequences: Sequences | ProjectedSequences) -> Tensor:
        """Hidden states [T, D] after the last norm; `logits` turns the rows that are wanted into
        logits. `tokens_T` is None where the sequences have the tokens' embeddings.
        """
        x_TD: Any = self._embedded(tokens_T, sequences)  # one name: nothing else holds it
        ropes = {layer.rope for layer in self.config.layers if layer.rope is not None}
        angles = {rope: _angles(rope, sequences) for rope in ropes}
        late = self.adds_late and isinstance(sequences, ProjectedSequences)
        x_TD = ResidualStream(x_TD) if late else x_TD
        for block in self.layers:
            x_TD = block(x_TD, angles, sequences)
        return self.norm(x_TD.total() if late else x_TD)

    def _embedded(
        self, tokens_T: Tensor | None, sequences: Sequences | ProjectedSequences
    ) -> Tensor:
        if tokens_T is None:
            assert isinstance(sequences, ProjectedSequences), "only those look embeddings up"
            return sequences.take_embeddings()
        x_TD: Tensor = self.embed(tokens_T)
        return x_TD if self.embedding_factor == 1.0 else x_TD * self.embedding_factor

    @property
    def embedding_factor(self) -> float:
        """The embedding's scale, rounded to the weights' dtype first, as Gemma was trained."""
        scale, dtype = self.config.embedding_scale, self.embed.weight.dtype
        return 1.0 if scale == 1.0 else torch.tensor(scale, dtype=dtype).item()

    @property
    def logits_dtype(self) -> torch.dtype:
        """What holds logits without loss: what the head makes (its weights may be codes), or fp32
        where they are scaled or capped after it.
        """
        return torch.float32 if self._changes_logits else self.embed.weight.dtype

    @property
    def _changes_logits(self) -> bool:
        return self.config.logit_scale != 1.0 or self.config.final_softcap is not None

    def logits(self, hidden_RD: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits [R, V] in fp32, or left in `out`, which has `logits_dtype`."""
        if out is not None and not self._changes_logits:
            left_RV: Tensor = self.head(hidden_RD, out_TO=out)
            return left_RV
        logits_RV = self.head(hidden_RD).float()
        if self.config.logit_scale != 1.0:
            logits_RV = logits_RV * self.config.logit_scale
        if self.config.final_softcap is not None:
            cap = self.config.final_softcap
            logits_RV = torch.tanh(logits_RV / cap) * cap
        return logits_RV if out is None else out.copy_(logits_RV)


def _angles(rope: RopeConfig, sequences: Sequences | ProjectedSequences) -> tuple[Tensor, Tensor]:
    if isinstance(sequences, ProjectedSequences):
        return sequences.angles(rope)
    return rope.angles(sequences.positions_T, sequences.lengths_T)


def build_model(config: ModelConfig, dtype: torch.dtype, device: str | torch.device) -> Transformer:
    """A model whose weights are allocated and not yet written (see `fill_random`)."""
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
    if config.tied_embeddings:
        model.head.register_parameter("weight", None)  # or it would get memory of its own
    # As `to_empty`, for which torch imports sympy: half a second.
    model._apply(lambda table: torch.empty(table.shape, dtype=table.dtype, device=device))
    if config.tied_embeddings:
        model.head.weight = model.embed.weight
    return model.requires_grad_(False).eval()


def fill_random(model: Transformer, seed: int = 0) -> Transformer:
    """Write weights drawn from a normal distribution, norms near their neutral value: for tests and
    for timing.
    """
    generator = torch.Generator(device=model.embed.weight.device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(name, parameter, model.config, generator)
    return model


def random_parameters(
    model: Transformer, device: str | torch.device, seed: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """What `fill_random` writes, one parameter at a time, of a model that has no memory yet."""
    generator = torch.Generator(device=device).manual_seed(seed)
    wanted = [(name, value.shape, value.dtype) for name, value in model.named_parameters()]
    for name, shape, dtype in wanted:
        whole = torch.empty(shape, dtype=dtype, device=device)
        _draw(name, whole, model.config, generator)
        yield name, whole
        del whole


def _draw(name: str, values: Tensor, config: ModelConfig, generator: torch.Generator) -> None:
    if name.endswith("norm.weight"):
        values.normal_(1.0 - config.norm_offset, 0.1, generator=generator)
    else:
        values.normal_(0.0, values.shape[-1] ** -0.5, generator=generator)
