"""The glossary: every word of the project that means something particular, and those of the field
that the lessons use. The one owner: docs/glossary.md is made from it, `ridgeline explain` reads it.

A term's `figures` name what glossary.py says of this machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Origin = Literal["project", "field"]


@dataclass(frozen=True)
class GlossaryTerm:
    name: str
    meaning: str
    lesson: str = ""  # where it is taught
    figures: str = ""  # a key of glossary.FIGURES
    also: tuple[str, ...] = ()  # other names
    origin: Origin = "field"


def _ours(name: str, meaning: str, lesson: str = "", figures: str = "") -> GlossaryTerm:
    return GlossaryTerm(name, meaning, lesson, figures, origin="project")


def _term(name: str, meaning: str, lesson: str, figures: str = "", also: str = "") -> GlossaryTerm:
    others = tuple(each.strip() for each in also.split(",") if each.strip())
    return GlossaryTerm(name, meaning, lesson, figures, others)


PROJECT = (
    _ours("baseline", "what a climb starts from: the plain fp32 loop"),
    _ours("bound", "the limit on how far answers may move: mean KL divergence and perplexity; or a latency to keep", "quantization"),
    _ours("ceiling", "the most a device was measured to do (bytes/s, FLOP/s), or what its datasheet says", "machine", "ceilings"),
    _ours("choice", "the tile sizes and kernel that were measured to be fastest for an op, shape and device", "matrix_product"),
    _ours("climb", "one run of `optimize`: the defaults and a guess first, then changes one after the other"),
    _ours("draft", "tokens proposed ahead, to be verified in one pass", "speculation", "free_rows"),
    _ours("gap", "time in which the device waits for the next launch", "launches", "launch"),
    _ours("head", "the matrix that turns the last hidden state into logits", "quantization"),
    _ours("layout", "how work is spread over devices", "parallelism"),
    _ours("limit", "the least time a step can take: its bytes and FLOPs over the ceilings", "roofline", "decode_limit"),
    _ours("overlap", "launching the next step before the last one's tokens reach the host", "launches", "launch"),
    _ours("page", "a fixed number of tokens' keys and values; the unit of the KV cache", "batching", "kv"),
    _ours("plain loop", "`engine/naive.py`: one request, references only; defines the right answer"),
    _ours("recipe", "how a model is executed: dtype, scheme, KV cache, graphs, limits; saved as `recipe.json`"),
    _ours("record", "what was measured, with spread, machine, versions, commit and command"),
    _ours("reference", "an op's definition in fp32 PyTorch; its kernels are tested against it"),
    _ours("ridge", "the point of a roofline where memory-bound meets compute-bound", "roofline", "ridge"),
    _ours("room", "a folder inside a large folder; rooms import in one direction"),
    _ours("round", "one timed run of part of a workload; two recipes take turns in rounds"),
    _ours("rung", "one change to a recipe, with the condition under which it applies"),
    _ours("scheme", "what quantized weights look like: `int8`, `int4-g128`, `fp8`, …", "quantization", "decode_limit"),
    _ours("step", "one forward pass over all requests that are running", "batching", "decode_limit"),
    _ours("verdict", "what bounds an op or a step: memory, compute, overhead, communication, host", "roofline", "ridge"),
    _ours("workload", "requests with lengths and arrival times, used by `bench`, `optimize` and `profile` alike", "serving"),
)  # fmt: skip

FIELD = (
    _term("activation", "a tensor between two layers; training keeps many of them for the backward pass", "training"),
    _term("activation recomputation", "keeping a layer's input alone and computing the rest again in the backward pass: a third more work for a fraction of the memory", "training", also="gradient checkpointing, recomputation"),
    _term("all-reduce", "every rank gets the sum over all ranks; a ring sends 2(n−1)/n of the bytes from each", "parallelism"),
    _term("arithmetic intensity", "operations done for each byte moved, FLOP/B", "roofline", "ridge", "operational intensity"),
    _term("Arrow", "columns in memory, each one buffer, alike in every language: handing them over copies nothing", "data"),
    _term("autotuning", "timing several tile sizes on the device and keeping the fastest", "matrix_product"),
    _term("AWQ", "activation-aware weight quantization: important input channels are scaled up before rounding", "quantization"),
    _term("bandwidth", "bytes a second between memory and processor", "machine", "bandwidth"),
    _term("bf16", "16 bits with fp32's range and 8 significant bits", "number_formats", "matrix", "bfloat16"),
    _term("bubble", "time in which devices of a pipeline have nothing to do: (p−1)/(m+p−1) with p stages and m micro-batches", "parallelism", also="pipeline bubble"),
    _term("chunked prefill", "long prompts cut into pieces that go along with other requests' decode rows", "batching"),
    _term("coalescing", "neighbouring threads reading neighbouring addresses, so that a warp's loads become few transfers", "vector_add", "bandwidth"),
    _term("context parallel", "each sequence is split over devices, which pass keys and values on", "parallelism"),
    _term("continuous batching", "deciding at every step which requests run, so that a finished one's place is taken at once", "batching", "free_rows", "in-flight batching"),
    _term("cuBLAS", "NVIDIA's library of matrix products; AMD's are rocBLAS and hipBLASLt", "matrix_product", "matrix", "rocBLAS, hipBLASLt"),
    _term("CUDA graph", "a whole step's launches recorded once and replayed by one call; addresses and shapes are fixed", "launches", "launch", "graph"),
    _term("cuDNN", "NVIDIA's library of convolutions, attention and norms; AMD's is MIOpen", "fusion", also="MIOpen"),
    _term("data parallel", "each device has all weights and a part of the batch; gradients are averaged", "parallelism", also="replicate, DDP"),
    _term("decode", "making one token after the other: bound by reading the weights", "batching", "decode_limit"),
    _term("DGX", "NVIDIA's node of 8 GPUs joined by NVLink switches; a SuperPOD's unit is 32 of them", "parallelism", also="SuperPOD"),
    _term("eager", "running operations one by one as Python reaches them", "fusion", "launch"),
    _term("expert parallel", "a mixture's experts lie on different devices; tokens travel to them and back", "parallelism", also="mixture of experts, MoE"),
    _term("FlashAttention", "attention in blocks with a running largest value and sum: the scores never reach memory", "attention", "ridge"),
    _term("fp8", "8 bits: e4m3 (largest 448) or e5m2 (57,344), with scales beside them", "number_formats", "matrix"),
    _term("FSDP", "fully sharded data parallel: weights, gradients and moments are split, and a layer's weights fetched when it runs (ZeRO-3)", "parallelism", also="ZeRO, shard, sharded data parallel"),
    _term("fusion", "several operations in one kernel, with the numbers in registers between them", "fusion", "bandwidth"),
    _term("goodput", "requests a second that kept their latency bounds", "serving"),
    _term("GPTQ", "rounding a weight column by column while the columns to come make up for the error", "quantization"),
    _term("GQA", "grouped-query attention: several query heads share a key-value head, so that the cache is smaller", "batching", "kv"),
    _term("gradient accumulation", "adding up the gradients of several micro-batches before an update", "training"),
    _term("GradScaler", "multiplies the loss so that fp16 gradients do not become 0, and skips steps that overflow", "number_formats", also="loss scaling"),
    _term("HIP", "AMD's C++ for GPUs, CUDA's with other names", "rocm", also="ROCm"),
    _term("kernel", "a function that runs on the device as many programs or threads at once", "vector_add", "launch"),
    _term("KL divergence", "how far one distribution is from another, in nats; of next tokens, the most sensitive measure of a changed model", "quantization"),
    _term("KV cache", "the keys and values of all tokens so far, kept so that they need not be computed again", "batching", "kv"),
    _term("launch", "the host's request that a kernel be run", "launches", "launch", "launch overhead"),
    _term("learning rate", "how far an update moves the weights; the setting that matters most", "training"),
    _term("Little's law", "requests in the system = arrivals a second × seconds each stays", "serving"),
    _term("LoRA", "training two thin matrices beside each frozen weight", "training", also="adapter"),
    _term("master weights", "fp32 copies that updates are added to, because 16 bits would round them away", "number_formats"),
    _term("MFU", "model FLOPs utilization: the operations that the model needs over what the chip could have done in that time", "training", "mfu", "model FLOPs utilization"),
    _term("micro-batch", "the tokens of one pass; memory decides how many", "training"),
    _term("MinHash", "the least hash of a set under many hash functions: the share that two sets have in common estimates their Jaccard similarity", "data"),
    _term("mixed precision", "multiplying in 16 or 8 bits while sums and master weights stay in fp32", "number_formats", "matrix"),
    _term("NCCL", "NVIDIA's library of collectives; AMD's is RCCL with the same calls, and gloo is the CPUs'", "parallelism", also="RCCL, gloo"),
    _term("Nsight", "NVIDIA's profilers: Systems for timelines, Compute (ncu) for one kernel's counters", "profiling", also="ncu, nsys, rocprofv3"),
    _term("NVLink", "NVIDIA's link between GPUs: 900 GB/s both ways together on an H100 or H200", "parallelism"),
    _term("occupancy", "warps resident on an SM over the most it can hold; it hides latency, and registers limit it", "profiling", "units"),
    _term("online softmax", "largest value and sum in one walk: the sum is rescaled when the largest value grows", "softmax"),
    _term("Parquet", "columns in a file, compressed in row groups with the least and largest value of each", "data"),
    _term("perplexity", "exp of the mean loss a token: how many tokens the model hesitates between", "quantization"),
    _term("pinned memory", "host memory that the system will not move, so that the GPU can copy it by itself", "launches", "h2d", "page-locked memory"),
    _term("pipeline parallel", "devices have consecutive layers; micro-batches follow each other through them", "parallelism"),
    _term("prefill", "computing a whole prompt at once: bound by arithmetic", "batching", "prefill_limit"),
    _term("prefix cache", "pages of prompts kept for requests that begin alike", "batching", "kv", "prefix sharing"),
    _term("QAT", "quantization-aware training: the forward pass rounds, and the gradient passes through", "quantization"),
    _term("quantization", "storing numbers in fewer bits with scales", "quantization", "decode_limit"),
    _term("register", "the fastest memory, a thread's own; too many in use lower occupancy, and more than there are spill to memory", "profiling", "units"),
    _term("roofline", "a chart of rate over intensity under a slope (bandwidth) and a flat (matrix rate)", "roofline", "ridge"),
    _term("sequence parallel", "activations between tensor-parallel parts are split along tokens", "parallelism"),
    _term("shared memory", "memory on the SM that a block's threads share; LDS on AMD", "matrix_product", "units", "LDS"),
    _term("SM", "streaming multiprocessor: one of a GPU's processors (a CU on AMD)", "profiling", "units", "CU, streaming multiprocessor"),
    _term("SmoothQuant", "moving activations' outliers into the weights, channel by channel, so that both fit int8", "quantization"),
    _term("speculative decoding", "a cheap draft of several tokens, checked by the model in one pass, exact by rejection sampling", "speculation", "free_rows"),
    _term("stall", "a warp waiting: for memory, a barrier, or a busy unit", "profiling"),
    _term("stream", "a queue of work on a device, whose entries run in order", "launches", "launch"),
    _term("tensor core", "the unit that multiplies small matrices; a matrix core (MFMA) on AMD", "matrix_product", "matrix", "matrix core, wgmma, MFMA"),
    _term("tensor parallel", "each matrix is split over devices, two at a time, with one sum after both", "parallelism"),
    _term("throughput", "tokens or requests a second over all users", "serving", "decode_limit"),
    _term("tile", "the part of a result that one program makes; its size decides how often data is fetched", "matrix_product"),
    _term("torch.compile", "collects a function's operations into a graph and generates fused code for it", "fusion"),
    _term("TPOT", "time per output token, after the first", "serving", "decode_limit", "inter-token latency, ITL"),
    _term("Triton", "a language for kernels in Python: programs work on blocks, and the compiler places threads", "vector_add"),
    _term("TTFT", "time to first token: queue and prefill", "serving", "prefill_limit"),
    _term("warp", "32 threads that run in step (64 on AMD's data-center chips, a wavefront)", "vector_add", "units", "wavefront"),
    _term("wave quantization", "the last round of tiles that leaves part of the chip idle", "matrix_product", "units"),
)  # fmt: skip

TERMS = PROJECT + FIELD
