"""What published measurements were made with: software, GPUs and models, as plans read them.

A GPT of two matrices of 4·hidden stands as a gated MLP of 8/3·hidden: the same weights, products
and kept bytes. What is not known here is refused by points.py, never guessed.

    stack_of("mcore_h100", {}), model_named("Llama 3.1 8B"), pool_named("A100 40GB", 64)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ridgeline.hardware.fabrics import DGX_A100, GBIT, NodeFabric
from ridgeline.models import ExpertsConfig, LayerConfig, ModelConfig
from ridgeline.models.shapes import SHAPES, describe_shape
from ridgeline.planning.clusters.cluster import GpuPool
from ridgeline.planning.clusters.parsing import gpu_named
from ridgeline.planning.training.setup import Stack
from ridgeline.planning.validating.source_facts import day_slowness, sums_in_fp32

# Of an eager launch and of waking up behind its kernel: 12 µs (H200, 2026-11-15) and a guess of 8.
BLOCKING_LAUNCH_S = 20e-6
MEGATRON_2021 = Stack(
    "Megatron-LM 2021", attention="scores", passes=2.0, hides_data=False, reduce_bytes=2,
    splits_sends=True, waits_for_sends=True, has_dropout=True, fuses_loss=False, logit_copies=8.0,
    is_full_attention=True,
)  # fmt: skip
# Its gradients' products add to the sums in fp32 (apex's, the default since 3.0).
MEGATRON_2022 = replace(MEGATRON_2021, name="Megatron-LM 2022", adds_in_products=True)
# With CUDA_LAUNCH_BLOCKING=1, without which it hung (tr11-176B-ml.slurm). In fp16 gradients are
# summed where they are.
BIGSCIENCE = replace(
    MEGATRON_2021, name="Megatron-DeepSpeed (BLOOM)", shards_optimizer=True, has_dropout=False,
    gradient_bytes=2, launch_s=BLOCKING_LAUNCH_S,
)  # fmt: skip
BIGSCIENCE_BF16 = replace(BIGSCIENCE, gradient_bytes=4, reduce_bytes=4)
MEGATRON_CORE = Stack(
    "Megatron-Core", attention="cudnn", splits_sends=True, shards_optimizer=True, hides_tensor=0.5,
    fuses_loss=False, logit_copies=6.0, joins_rows=True, adds_in_products=True,
)  # fmt: skip
GOLDENS = replace(
    MEGATRON_CORE, name="Megatron-Core CI", attention="flash2", passes=2.0, hides_tensor=0.0,
    hides_data=False, adds_in_products=False,
)  # fmt: skip
TORCHTITAN = Stack("torchtitan", attention="flash2", passes=2.5, gradient_bytes=2, reduce_bytes=4,
                   fuses_loss=False, logit_copies=8.0)  # fmt: skip
MOSAIC = Stack("llm-foundry", attention="flash", passes=2.0, reduce_bytes=2, gradient_bytes=4,
               fuses_loss=False, logit_copies=8.0)  # fmt: skip
TRANSFORMERS = Stack("transformers", attention="flash2", passes=3.0, gradient_bytes=2,
                     master_bytes=4.0, fuses_loss=False, logit_copies=10.0)  # fmt: skip
LIGER = replace(TRANSFORMERS, name="transformers + Liger", passes=1.5, fuses_loss=True)

# fp8 with a scale a row, of what a scale a tensor takes: nanochat's 1.17 and 0.90 of bf16's speed.
ROW_SCALES = 1.3
NAMES = {
    "llama 3.1 8b": "llama-3.1-8b", "llama3_8b": "llama-3.1-8b",
    "llama 3.1 70b": "llama-3.1-70b", "llama3_70b": "llama-3.1-70b",
    "llama 3.1 405b": "llama-3.1-405b", "llama3.1_405b": "llama-3.1-405b",
    "llama-3.2-1b shape": "llama-3.2-1b",
    "qwen3_30b_a3b": "qwen3-30b-a3b", "qwen3_235b_a22b": "qwen3-235b-a22b",
}  # fmt: skip
# Jean Zay's nodes: 8 GPUs, 4 OmniPath cards of 100 Gbit/s (chronicles of BLOOM's training).
JEAN_ZAY = replace(DGX_A100, name="Jean Zay", nics=4, nic_gbit=100)
ROCE_1600 = replace(DGX_A100, name="8 x A100, RoCE", nics=8, nic_gbit=200)


def gpt(layers: int, hidden: int, heads: int, vocab: int, context: int, kv_heads: int | None = None,
        ffn: int | None = None) -> ModelConfig:  # fmt: skip
    """A model of GPT's shape."""
    mlp = round((4 * hidden if ffn is None else ffn) * 2 / 3)
    # A multiple that tensor parallel of up to 16 can share.
    mlp += -mlp % 16
    return ModelConfig(
        family="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads or heads,
        head_dim=hidden // heads,
        mlp_size=mlp,
        max_context=context,
        layers=(LayerConfig(None, None),) * layers,
        tied_embeddings=True,
    )


def gpt_oss_120b() -> ModelConfig:
    """From its model card: 36 layers, every second with a window of 128."""
    experts = ExpertsConfig(128, 4, 2880, True)
    layers = tuple(LayerConfig(None, 128 if i % 2 == 0 else None, experts) for i in range(36))
    return ModelConfig("llama", 201088, 2880, 64, 8, 64, 2880, 131072, layers, qkv_bias=True,
                       out_bias=True)  # fmt: skip


def model_named(name: str) -> ModelConfig | None:
    plain = re.sub(r"\s*\(.*\)", "", name).strip().lower()
    if plain == "gpt oss 120b":
        return gpt_oss_120b()
    shape = NAMES.get(plain, plain)
    return describe_shape(shape).config if shape in SHAPES else None


def stack_of(group: str, row: Mapping[str, str]) -> Stack | None:
    """None: a source that is not known here."""
    note, dtype = row.get("note", "") + row.get("technique", ""), row.get("dtype", "")
    if group == "torchtitan":
        compiled = "compile" in note or "float8" in dtype or "fp8" in dtype
        return replace(TORCHTITAN, passes=1.3 if compiled else 2.5,
                       hides_tensor=0.6 if "async" in note.lower() else 0.0,
                       slowness=1.0 if "row" not in dtype else ROW_SCALES)  # fmt: skip
    if group == "llm_foundry":
        return MOSAIC
    if group == "ridgeline_h200":
        liger = "Liger" in note
        base = LIGER if liger else TRANSFORMERS
        return replace(base, passes=base.passes / 1.5 if "compile" in note else base.passes)
    if group in ("bloom_layouts", "bloom"):
        base = BIGSCIENCE_BF16 if sums_in_fp32(row) else BIGSCIENCE
        return replace(base, slowness=day_slowness(row))
    table = {"megatron2021": MEGATRON_2021, "megatron2021t2": MEGATRON_2021,
             "korthikanti2022": MEGATRON_2022, "mcore_h100": MEGATRON_CORE,
             "megatron_bridge": MEGATRON_CORE, "mcore_goldens": GOLDENS}  # fmt: skip
    return table.get(group)


def pool_named(text: str, num_gpus: int) -> GpuPool | None:
    """None: a GPU that is not known here."""
    if "96GB HBM2e" in text:  # Grand Teton's own H100
        spec = replace(gpu_named("H100"), memory_gb=96, bandwidth_gb_s=2400, power_w=500)
        return _pool(spec.name, num_gpus, spec_override=spec)
    names = [("A100-80GB", "A100"), ("A100 80GB", "A100"), ("A100 40GB", "A100-40GB"),
             ("GB300", "GB300"), ("GB200", "GB200"), ("B300", "B300"), ("B200", "B200"),
             ("H200", "H200"), ("H100", "H100"), ("A100", "A100")]  # fmt: skip
    name = next((known for part, known in names if part in text), None)
    if name is None:
        return None
    pool = _pool(name, num_gpus)
    if "Jean Zay" in text:
        return replace(pool, node=JEAN_ZAY)
    return pool


def _pool(name: str, num_gpus: int, spec_override: object = None) -> GpuPool:
    from ridgeline.hardware.fabrics import usual_node

    spec = gpu_named(name)
    node: NodeFabric = usual_node(spec.name)
    return GpuPool(spec_override or spec, num_gpus, node)  # type: ignore[arg-type]


__all__ = ["GBIT", "gpt", "model_named", "pool_named", "stack_of"]
