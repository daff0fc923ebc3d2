"""Runs a model block by block over packed sequences, without a cache: how a model larger than the
device's memory is calibrated.

`BlockWalk` holds the inputs of the next block, on the device or on the host. A block is copied to
the device, watched, changed and run once more; the model itself stays as it is.

Letters: B sequences, S tokens of each, T = B · S tokens end to end, D hidden size, N query heads, K
key-value heads, H head dim.

    walk = BlockWalk(model, batches, "cuda")
    for index in range(model.config.num_layers):
        block = walk.copy_block(index)
        walk.advance(block)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from ridgeline.errors import UsageError
from ridgeline.kernels.attention import AttentionSpec
from ridgeline.kernels.prefill_attention import Packing, prompt_attention
from ridgeline.kernels.prefill_attention.sdpa import equal_prompts
from ridgeline.models import Transformer
from ridgeline.models.copies import on_device
from ridgeline.models.transformer import Block

WatchHeads = Callable[[Tensor, Tensor], None]  # sees keys and values [T, K, H] as attention does


class PackedPrompts:
    """Sequences of one length, each attending only to itself; nothing is cached."""

    def __init__(
        self, num_sequences: int, length: int, device: torch.device, watch: WatchHeads | None = None
    ) -> None:
        self.num_sequences, self.length, self.watch = num_sequences, length, watch
        self.positions_T = torch.arange(length, device=device).repeat(num_sequences)
        self.lengths_T = torch.full_like(self.positions_T, length)

    def attend(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: AttentionSpec
    ) -> Tensor:
        if self.watch is not None:
            self.watch(k_TKH, v_TKH)
        if spec.softcap is None and (spec.window is None or spec.window >= self.length):
            return equal_prompts(q_TNH, k_TKH, v_TKH, self.num_sequences, spec, None)
        ends = torch.arange(0, len(q_TNH) + 1, self.length, dtype=torch.int32, device=q_TNH.device)
        return prompt_attention(q_TNH, k_TKH, v_TKH, Packing(ends, self.length), spec)


class BlockWalk:
    """Calibration data on its way through the model."""

    def __init__(
        self,
        model: Transformer,
        batches: Iterable[Tensor],
        device: str | torch.device | None = None,
        keep_on_host: bool = False,
    ) -> None:
        """`batches` are token ids, [S] or [B, S]; `device` is where blocks are run, the model's own
        if not given. With `keep_on_host`, a block's inputs wait in host memory.
        """
        self.model = model
        self.device = torch.device(device or model.embed.weight.device)
        self.waits_on = torch.device("cpu") if keep_on_host else self.device
        tokens = [_checked(batch, model) for batch in batches]
        if not tokens:
            raise UsageError("calibration has no tokens; give at least one batch of token ids")
        self.shapes = [(batch.shape[0], batch.shape[1]) for batch in tokens]
        self.inputs = [self._embedded(batch) for batch in tokens]

    @property
    def num_batches(self) -> int:
        return len(self.inputs)

    def _embedded(self, tokens_BS: Tensor) -> Tensor:
        embed = self.model.embed
        x_TD: Tensor = embed(tokens_BS.flatten().to(embed.weight.device)).detach()
        return (x_TD * self.model.embedding_factor).to(self.waits_on)

    def copy_block(self, index: int) -> Block:
        """A copy of the block on the device, free to be changed."""
        block = self.model.layers[index]
        assert isinstance(block, Block)
        if block.attn.qkv.weight.device.type == self.device.type:
            return copy.deepcopy(block).to(self.device)
        return on_device(block, self.device)  # the copy is on the way

    @torch.no_grad()
    def run(self, block: Block, watch: WatchHeads | None = None) -> Iterator[Tensor]:
        """The block's outputs [T, D], batch by batch."""
        ropes = {layer.rope for layer in self.model.config.layers if layer.rope is not None}
        for x_TD, (num_sequences, length) in zip(self.inputs, self.shapes, strict=True):
            sequences = PackedPrompts(num_sequences, length, self.device, watch)
            positions_T, lengths_T = sequences.positions_T, sequences.lengths_T
            angles = {rope: rope.angles(positions_T, lengths_T) for rope in ropes}
            # A copy, because on a GPU a block may add to its input in place.
            yield block(x_TD.to(self.device, copy=True), angles, sequences)

    def advance(
        self,
        block: Block,
        on_batch: Callable[[], None] = lambda: None,
        watch: WatchHeads | None = None,
    ) -> None:
        """Make the block's outputs the inputs of the next one."""
        for number, out_TD in enumerate(self.run(block, watch)):
            self.inputs[number] = out_TD.to(self.waits_on)
            on_batch()


def _checked(tokens: Tensor, model: Transformer) -> Tensor:
    tokens_BS = tokens.unsqueeze(0) if tokens.dim() == 1 else tokens
    if tokens_BS.dim() != 2 or tokens_BS.numel() == 0 or tokens_BS.is_floating_point():
        raise UsageError(
            f"a calibration batch is {tokens.dtype} of shape {list(tokens.shape)}; "
            "give token ids [tokens] or [sequences, tokens]"
        )
    size = model.config.vocab_size
    if int(tokens_BS.min()) < 0 or int(tokens_BS.max()) >= size:
        raise UsageError(
            f"a calibration batch has token ids outside the model's vocabulary of {size}; "
            "use the tokenizer that belongs to the model"
        )
    return tokens_BS
