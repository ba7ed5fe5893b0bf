"""The tables of config.toml by which a worker's engine computes, and guesses."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from policies.holding import KeptGrammars
from policies.section import NonNegative, Positive, Section

Share = Annotated[float, Meta(ge=0, le=0.95)]
KV_MEMORY_SHARES = {"cpu": 0.3, "cuda": 0.9}
"""By kind of device: on the CPU others need memory, too; on a CUDA device the rest is for what a step leaves behind."""
Quantization = Literal["none", "int8", "int4", "fp8"]


class Speculation(Section, frozen=True):
    """Tokens that are guessed and verified several in a step; never at the cost of an answer."""

    enabled: bool = True
    drafters: tuple[Literal["suffix", "store", "grammar", "model"], ...] = ("suffix", "store", "grammar", "model")
    """Who guesses: from the same text, recent answers, what a schema leaves no choice about, a small model's say."""
    draft_model: str = ""
    """Of that small model: a directory, a GGUF file or a hub id, as for ``source``; or a directory of Medusa heads or
    an EAGLE-3 head that were trained on the model. Empty: the demo model has one of its own, others have none."""
    max_draft_tokens: Annotated[int, Meta(ge=1, le=64)] = 47
    """Guessed for one sequence in one step, at most; how many pay is measured."""


class Engine(Section, frozen=True):
    """One worker's engine; ``[models.NAME.engine]`` overrides single keys for one model."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda when there is one."""
    devices: tuple[NonNegative, ...] = ()
    """Indexes of the CUDA devices that the model's replicas take in turn, each as many as it has ranks; empty: of all,
    those that fewest workers started here have."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """auto: bfloat16 where the device computes it natively, float32 elsewhere."""
    quantize: Quantization = "none"
    """What the matrices of a model that is not quantised become when it is loaded: a half or a quarter of the bytes to
    read for a token, at a small loss (benchmarks/quantised.md). fp8 pays only where the device multiplies it."""
    kv_dtype: Literal["auto", "bf16", "int8", "fp8"] = "auto"
    """How keys and values are kept. auto: in the type that the model computes in; int8, or on CUDA devices fp8: about
    half of that, each token and KV head with a scale of its own, at a small loss."""
    quantize_activations: bool = True
    """What multiplies int8 or int4 matrices may round their inputs to int8 as well, by token or by group (on CUDA those
    of int8 to int8 and those of fp8 to fp8), which is much faster where the processor multiplies so; false: only
    weights are rounded."""
    tensor_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    """Processes that share each matrix of the model, each with a device of its own, or with its part of the CPU's
    cores; the model's heads must be divisible by it."""
    pipeline_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    """Stages that the model's layers are divided into, one after the other; each of them has ``tensor_parallel``
    processes."""
    num_threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """CPU threads of each process; 0: one a physical core of its memory node, or as many as a quota of CPUs allows if
    these are fewer, less one for the gateway from four up, divided among the model's processes there."""
    kv_memory_share: Share = 0
    """Share of the memory free after the weights are loaded that becomes KV blocks; 0: 0.3 on the CPU; 0.9 on a CUDA
    device, divided by the number of the workers started here that share it, a draft model counted as one."""
    max_kv_bytes: NonNegative = 0
    """Upper bound of the same; 0: none."""
    block_size: Annotated[int, Meta(ge=8, le=256)] = 32
    """Tokens a KV block."""
    max_model_tokens: NonNegative = 0
    """Prompt and completion together; 0: what the model's files say."""
    max_sequences: Positive = 256
    """Sequences in one batch."""
    max_step_tokens: Positive = 2048
    """Tokens of one step, prefill and decode together."""
    max_prefill_tokens_beside_decodes: Positive = 2048
    """Of those, prompt tokens beside answers being written: fewer keep streams smoother, more start answers sooner."""
    max_slowdown: Annotated[float, Meta(ge=0, le=1e6)] = 1.8
    """Fewer still, so that a step takes at most so many times as long as its answers alone would (more where several
    prompts wait, or where a first token would be late and the answers are ahead of what their classes promise for a
    token; less where that promise is tighter); 0: no such limit."""
    max_preemptions: NonNegative = 3
    """So often a sequence is put back for others, and has to compute again what it lost of its KV; then no more, unless
    nobody could move otherwise."""
    prefix_cache: bool = True
    max_adapter_bytes: NonNegative = 1 << 30
    """That adapters may take in memory, beside model and KV; those used least recently make room; 0: none are
    served."""
    deterministic: bool = False
    """The same request has the same tokens and log-probabilities, to the bit, whatever else is in the batch, however
    prompts are cut into chunks, whoever loses blocks and whatever is found in the prefix cache. It costs speed
    (benchmarks/deterministic.md)."""
    attention: Literal["auto", "torch", "reference"] = "auto"
    """auto: the fastest that works here; torch: without compiled kernels; reference: the plain one, for comparison."""
    cuda_graphs: bool = True
    """On CUDA, steps of decodes, with short chunks of prompts beside them or without, are recorded and replayed as one
    launch, sizes that recur first; not those with an adapter's row or a text that wants its vector, and none of a model
    that has Medusa heads or an EAGLE-3 head, latent attention, several processes, or transformers to compute it."""
    speculation: Speculation = Speculation()
    grammars: KeptGrammars = KeptGrammars()
