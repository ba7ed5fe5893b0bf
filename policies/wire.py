"""The messages between gateway and worker; how they become bytes is framing.py's.

Each side opens with ``Hello``; a side that reads another version, an unknown tag, a wrong type or a length over the
bound raises ``WireError`` and closes the channel. The worker listens, gateways connect; a worker serves several
channels and answers a request on the channel that submitted it.
A worker sends ``Stats`` at least once a second, so silence means that it is stuck.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from policies.terms import Chunk as Chunk  # of a Timeline
from policies.terms import FinishReason, Sampling
from policies.terms import Grammar as Grammar  # of a Submit, as is the next
from policies.terms import Pooling as Pooling
from policies.terms import Timeline as Timeline  # of a Finish

VERSION = 8


class WireError(Exception):
    """The other end sent what this protocol does not allow; the message names what."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages: a MessagePack array whose first item is the class name."""


# Both ways


class Hello(Message, frozen=True):
    """The first frame of each side."""

    version: int
    name: str
    """Who speaks, for logs: "gateway", or the worker's name."""
    asks: bool = True
    """A gateway that sends requests, and so takes a part of the worker; not one that only looks after it."""


# Gateway to worker


class Submit(Message, frozen=True):
    """Compute ``num_sequences`` answers to one prompt; they share its prefill."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    num_sequences: int = 1
    """Sequence i samples with seed ``sampling.seed + i`` (mod 2**64)."""
    priority: int = 0
    """Smaller goes first; equal ones in order of arrival."""
    cache_salt: bytes = b""
    """Prefixes are shared only between requests of equal salt."""
    traceparent: str = ""
    """W3C trace context of the request's span; its version alone where it has none so far and may come to have one;
    empty when not traced."""
    ttft_s: float | None = None
    """From now until its first token is due, by what its class was promised and what it has waited; below zero: it is
    late already. None: nothing was promised, and it is due at once."""
    tpot_s: float | None = None
    """Promised for each further token; None: nothing was."""
    tenant: bytes = b""
    """Whose it is, for fairness: equal for requests of one tenant and no more than that."""
    weight: float = 1.0
    """> 0: beside others of its class, the tenant's prompts have so many times the part of one with 1."""
    emitted_token_ids: dict[int, list[int]] = {}
    """Of a request that was begun elsewhere: by index, the sequences that go on, each with the tokens of its completion
    that were emitted there; none where it had not begun. They count as its output in all that follows, its position,
    limits and penalties, and are not told again. A sequence that is not named has ended. Empty: all begin here."""

    adapter: str = ""
    """The id of an adapter that this channel has loaded; empty: the model as it is."""
    grammar: Grammar | None = None
    """None: any text will do."""
    pooling: Pooling | None = None
    """In place of tokens one vector is wanted, of one sequence; ``sampling`` is of no consequence then."""
    predicted_token_ids: list[int] = []
    """What much of the answer is expected to be: for whoever guesses, and of no other consequence."""
    cut_indices: list[int] = []
    """Of the sequences that go on: those of which a ``Delta`` said ``is_cut``."""

    @property
    def num_positions(self) -> int:
        """The most tokens that one of its sequences can come to have."""
        return len(self.prompt_token_ids) + (0 if self.pooling is not None else self.sampling.max_tokens)

    @property
    def indices(self) -> Sequence[int]:
        """Of the sequences to compute."""
        return sorted(self.emitted_token_ids) or range(self.num_sequences)


class Cancel(Message, frozen=True):
    """Nobody waits for this sequence any more: it leaves the batch within one step and answers with a last ``Delta``,
    finished as "cancelled". An unknown id is no error and has no answer (it may just have finished)."""

    request_id: str
    index: int | None = None
    """One sequence of the request; None: all of them."""


class Drain(Message, frozen=True):
    """Take no further ``Submit``; exit 0 when the last sequence has finished."""


class LoadAdapter(Message, frozen=True):
    """From now on requests may ask for this adapter, as soon as ``AdapterLoaded`` or earlier: they wait for it."""

    adapter: str
    """Its id, which never stands for other weights: another version has another one."""
    source: str
    """A directory in PEFT's layout, where the worker runs."""
    digest: str = ""
    """What its files must be, as ``AdapterLoaded`` said of the first that loaded it; empty: whatever they are."""


class UnloadAdapter(Message, frozen=True):
    """No further request of this channel asks for it; those that did go on. Has no answer."""

    adapter: str


# Worker to gateway


class Ready(Message, frozen=True):
    """The model is loaded and answered a probe; sent once on each channel, after ``Hello``."""

    model: str
    max_model_tokens: int
    """Prompt and completion together."""
    vocab_size: int
    eos_token_ids: list[int]
    block_size: int
    """Tokens a KV block."""
    num_blocks: int
    max_sequences: int
    device: str
    dtype: str
    """Of activations, and of matrices where they were made something else: "bfloat16" or "bfloat16/int8"."""
    pid: int
    tensor_parallel: int = 1
    """Processes that share each matrix of the model."""
    pipeline_parallel: int = 1
    """Stages that its layers are divided into."""
    max_adapter_bytes: int = 0
    """That adapters may take in memory; 0: it takes none."""
    deterministic: bool = False
    """A request has the same tokens and log-probabilities in any company, to the bit."""
    kv_dtype: str = "auto"
    """As ``engine.kv_dtype`` says; part of the names of its KV blocks."""
    writes: bool = True
    """It continues a text; else it can only be asked for vectors."""
    pooling: Pooling | None = None
    """How its vectors are meant to be made; None: it makes none."""
    num_dimensions: int = 0
    """Of its vectors."""
    scores: bool = False
    """It can be asked for scores."""

    @property
    def num_ranks(self) -> int:
        """Processes that compute it together."""
        return self.tensor_parallel * self.pipeline_parallel


# The three below come by the thousand and refer to nothing that could refer back, so the collector need not count them.


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probability of a sampled token, and of the likeliest ones (likeliest first)."""

    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]


class Finish(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How a sequence ended and what it took; times in seconds, by the worker's clock."""

    reason: FinishReason
    num_cached_tokens: int
    """Of the prompt, those whose KV was found."""
    num_preemptions: int
    """How often it lost KV for others, all of it or the end."""
    queue_s: float
    """Submitted until first scheduled."""
    prefill_s: float
    """First scheduled until first token sampled."""
    decode_s: float
    """First token until last."""
    engine_s: float = 0.0
    """Its share of every step that it was in; the shares of a step add up to the step."""
    kv_block_s: float = 0.0
    """Blocks that it held, times how long; one that several sequences hold counts for each of them."""
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    """Of those drafted."""
    timeline: Timeline | None = None
    """Where the ``Submit`` had a traceparent."""
    has_end_token: bool = False
    """The last token that comes with it ended the answer and says nothing."""


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one sequence gained in one step. A sampled end token is included: it was computed and it is counted."""

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    """One for each token, when asked."""
    finish: Finish | None = None
    num_cached_tokens: int | None = None
    """With the first token: those of the prompt whose KV was found rather than computed. ``Finish`` says it again, for
    those who read to the end."""
    vector: bytes = b""
    """With the end of one that is pooled: all that was asked for, [num_dimensions] f32, least byte first."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """With a request's first token, when asked: one for each token of the prompt but the first."""
    is_cut: bool = False
    """For want of room its grammar has it go another way than it would have: even where it stops, its end is
    "length"."""


class StepOutput(Message, frozen=True):
    """Every sequence that moved in one step."""

    deltas: list[Delta]


class Failed(Message, frozen=True):
    """This request ends here, with no more deltas; nothing of it is left in the worker. What it took is that of its
    sequences which had not finished."""

    request_id: str
    code: str
    """``context_length_exceeded``, ``draining``, ``overloaded``, ``invalid_request``, ``adapter_unavailable`` or
    ``internal``."""
    reason: str
    engine_s: float = 0.0
    kv_block_s: float = 0.0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0


class Stats(Message, frozen=True):
    """The state of the worker: each second, and with a step that changed what waits or runs (at most ten a second)."""

    num_waiting: int
    num_running: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    """Kept for reuse, held by no sequence."""
    num_free_blocks: int
    num_prefill_tokens: int
    """Since start, as are the counters below."""
    num_decode_tokens: int
    num_cached_tokens: int
    num_steps: int
    num_preemptions: int
    """Sequences that lost all their KV for others, as often as it happened."""
    step_ms: float
    """Mean over the steps since the last Stats; 0 when there was none."""
    draining: bool = False
    cost_weights: tuple[float, ...] = ()
    """What steps cost here, as policies/costs.py has learned: seconds for each term; empty while it does not know."""
    num_gateways: int = 1
    """Those that may send it requests."""
    busy_s: float = 0.0
    """In steps since start. ``Finish`` and ``Failed`` say whose they were."""
    num_paused: int = 0
    """Of those running: had no part in the last step, though they could have."""
    num_tail_frees: int = 0
    """Since start: sequences that lost the end of their KV for others, and kept the rest."""
    num_displacements: int = 0
    """Since start: requests for which others were put aside."""
    num_adapters: int = 0
    """In memory now."""
    num_drafted_tokens: int = 0
    """Since start: guessed by drafters and verified."""
    num_accepted_tokens: int = 0
    """Of those: turned out to be right."""
    num_drafter_faults: int = 0
    """Since start: requests for which a drafter was switched off, since it had raised."""
    num_grammars: int = 0
    """Compiled, and kept for the next request."""
    num_grammars_compiled: int = 0
    """Since start."""
    grammar_compile_s: float = 0.0
    """Since start, beside the steps."""
    num_grammar_hits: int = 0
    """Since start: requests whose grammar was there."""
    num_grammars_refused: int = 0
    """Since start: requests whose grammar could not be made ready."""
    num_masks: int = 0
    """Since start."""
    mask_s: float = 0.0
    """Since start, that steps have waited for masks."""
    num_generated_tokens: int = 0
    """Since start: of answers, the first ones included."""
    num_drafts: int = 0
    """Since start: as often as a step verified guesses for a sequence."""
    num_prompt_tokens: int = 0
    """Since start: of prompts, each as it was computed or found first; of several answers to one, once."""
    num_idle: int = 0
    """Of those running: wait for what their grammars let them say, and lend their places meanwhile."""


class AdapterLoaded(Message, frozen=True):
    """The answer to ``LoadAdapter``, and to each repeated one."""

    adapter: str
    digest: str
    rank: int
    """The largest of its matrices'."""
    num_bytes: int
    """In memory."""


class AdapterRefused(Message, frozen=True):
    """The answer to ``LoadAdapter``, or, where its files cannot be read again, what became of it later: the worker has
    it no more."""

    adapter: str
    reason: str
    """One sentence."""


class KvEvents(Message, frozen=True):
    """Full KV blocks that came into the prefix cache, and those that left it, since this channel was last told; by
    digest (policies/prefix.py). Comes before the ``Stats`` of the same moment. The first one after ``Hello`` names all
    that are there, in several messages where they are many."""

    stored: list[bytes]
    evicted: list[bytes]


ToWorker = Hello | Submit | Cancel | Drain | LoadAdapter | UnloadAdapter
ToGateway = Hello | Ready | StepOutput | Failed | KvEvents | Stats | AdapterLoaded | AdapterRefused
