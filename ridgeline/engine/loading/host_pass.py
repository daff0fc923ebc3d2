"""A model's layers as one call of C++ a step (kernels/decoder_pass), where its weights are in a
GGUF file's blocks and its layers are plain ones; None where the layers run module by module.

    decoder = host_pass(on_host(model), kv)
    hidden_TD = decoder(ids_T, sequences)
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.engine.attention.host_sequences import HostSequences
from ridgeline.engine.attention.kv_cache import KVCache
from ridgeline.kernels import host_library
from ridgeline.kernels.block_linear.cpu import BlockMatrix
from ridgeline.kernels.decoder_pass.cpu import (
    OP,
    DecoderLayers,
    DecoderSizes,
    LayerParts,
    StepRows,
    supported,
)
from ridgeline.kernels.pages import Pages
from ridgeline.models import Transformer
from ridgeline.models.transformer import Block, DenseMLP, RMSNorm
from ridgeline.quantization.block_linear import HostBlockLinear


class HostPass:
    def __init__(self, model: Transformer, kv: KVCache) -> None:
        config = model.config
        self.model = model
        self.ropes = list(dict.fromkeys(layer.rope for layer in config.layers if layer.rope))
        blocks = [block for block in model.layers if isinstance(block, Block)]
        layers = [self._layer(block, pages) for block, pages in zip(blocks, kv.layers, strict=True)]
        sizes = DecoderSizes(
            config.hidden_size,
            config.q_size // config.head_dim,
            config.mlp_size,
            config.norm_eps,
            config.norm_offset,
            config.activation,
        )
        self.decoder = DecoderLayers(sizes, layers, model.norm.weight)

    def __call__(self, ids_T: Tensor, sequences: HostSequences) -> Tensor:
        """As the model itself: hidden states [T, D] in its dtype."""
        x_TD = self.model.embed(ids_T)
        if self.model.embedding_factor != 1.0:
            x_TD = x_TD * self.model.embedding_factor
        angles = [sequences.angles(rope) for rope in self.ropes]
        rows = StepRows(
            angles, sequences.inputs.slots, sequences.all_rows.starts, sequences.all_tables
        )
        return self.decoder.run(x_TD, rows).to(x_TD.dtype)

    def _layer(self, block: Block, pages: Pages) -> LayerParts:
        attn, mlp = block.attn, block.mlp
        assert isinstance(mlp, DenseMLP), "checked before"
        q_norm, k_norm = attn.q_norm, attn.k_norm
        return LayerParts(
            block.attn_norm.weight,
            block.mlp_norm.weight,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            _matrix(attn.qkv),
            _matrix(attn.out),
            _matrix(mlp.gate_up),
            _matrix(mlp.down),
            pages,
            None if attn.rope is None else self.ropes.index(attn.rope),
            attn.spec,
        )


def _matrix(layer: object) -> BlockMatrix:
    assert isinstance(layer, HostBlockLinear), "checked before"
    return layer.as_matrix()


def host_pass(model: Transformer, kv: KVCache) -> HostPass | None:
    """`model` is as on_host made it."""
    if not all(map(_is_plain, model.layers)) or not supported(kv.layers[0]):
        return None
    return HostPass(model, kv) if host_library.load(OP) else None


def _is_plain(block: object) -> bool:
    if not isinstance(block, Block) or not isinstance(block.mlp, DenseMLP):
        return False
    if block.attn_post_norm or block.mlp_post_norm or block.residual_scale != 1.0:
        return False
    parts = (block.attn.qkv, block.attn.out, block.mlp.gate_up, block.mlp.down)
    if not all(isinstance(part, HostBlockLinear) and part.packed for part in parts):
        return False
    norms = (block.attn_norm, block.mlp_norm, block.attn.q_norm, block.attn.k_norm)
    kinds = {(norm.eps, norm.offset) for norm in norms if isinstance(norm, RMSNorm)}
    return len(kinds) == 1
