"""A device whose every slot remembers what was written there, and a sampler that checks what was read.

Each slot of the memory holds the rolling hash of the history up to its token. A forward pass digests all slots that it
reads; the sampler, which knows each row's own tokens, computes the same digest from them. They agree only if every
slot that was read held exactly that sequence's own history: so a block shared wrongly, written while shared, evicted
or reused while in use is found in the first step that reads it. Layers with windows, where they have a pool apart, must
find there what the others find in theirs; where all layers have one, nothing before it is read.
"""

import numpy as np
import torch

from worker.sampler import Sampled
from worker.sequence import UNKNOWN
from worker.windows import NONE

MULTIPLIER = 6364136223846793005
MASK = (1 << 64) - 1


def following(history: int, token_id: int) -> int:
    """The hash of a history with one token more."""
    return ((history ^ (token_id + 0x9E3779B97F4A7C15)) * MULTIPLIER + 1442695040888963407) & MASK


class ScriptedRunner:
    def __init__(
        self,
        num_blocks=32,
        block_size=4,
        vocab_size=50,
        max_model_tokens=10_000,
        eos_token_ids=(0,),
        overlaps=False,
        apart=None,
        window=0,
    ):
        self.num_blocks, self.block_size, self.vocab_size = num_blocks, block_size, vocab_size
        self.max_model_tokens, self.eos_token_ids = max_model_tokens, eos_token_ids
        self.device, self.dtype = "cpu", "float32"
        self.overlaps = overlaps
        self.writes, self.scores, self.pooling, self.num_dimensions = True, False, None, 0
        self.scores_prompts = True
        self.window, self.apart = window, apart
        rng = np.random.default_rng(0)
        self.memory = rng.integers(0, MASK, size=(num_blocks, block_size), dtype=np.uint64)
        if apart is not None:
            self.memory_apart = rng.integers(0, MASK, size=(apart.num_blocks, block_size), dtype=np.uint64)
        self.weights = np.arange(1, 2 * num_blocks * block_size, 2, dtype=np.uint64)
        self.steps = []
        """Of each step, the (start, number of tokens) of its spans."""
        self.num_copies = 0
        self.fault = None
        """Called with the spans before they are computed."""

    def forward(self, spans, sampled_before=None):
        self.steps.append([(span.start, len(span.token_ids)) for span in spans])
        if self.fault is not None:
            self.fault(spans)
        digests = []
        written = set()
        for span in spans:
            assert len(span.token_ids) >= 1
            assert len(span.block_ids) * self.block_size >= span.start + len(span.token_ids)
            history = int(self.memory[self._slot(span, span.start - 1)]) if span.start else 0
            token_ids = list(span.token_ids)
            if span.source >= 0:
                assert token_ids[-1] == UNKNOWN
                token_ids[-1] = sampled_before[span.source]
            assert min(token_ids) >= 0, "a token that nobody knows is computed"
            for position, token_id in enumerate(token_ids, span.start):
                history = following(history, token_id)
                slot = self._slot(span, position)
                assert slot not in written, "two sequences write to one slot in one step"
                written.add(slot)
                self.memory[slot] = history
        if self.apart is not None:
            self._look_back(spans)
        for span in spans:
            end = span.start + len(span.token_ids)
            for num_tokens in range(end - span.num_logits + 1, end + 1):
                first = max(0, num_tokens - self.window) if self.window else 0
                slots = self.memory[np.array(span.block_ids)].reshape(-1)[first:num_tokens]
                digests.append(np.sum(slots * self.weights[first:num_tokens], dtype=np.uint64))
        return torch.from_numpy(np.array(digests, dtype=np.uint64).view(np.int64)).view(-1, 1)

    def _look_back(self, spans):
        """The same in the layers with windows."""
        written = set()
        for span in spans:
            end = span.start + len(span.token_ids)
            for position in range(span.start, end):
                slot = self._slot_apart(span, position)
                assert slot not in written, "two sequences write to one slot in one step"
                written.add(slot)
                self.memory_apart[slot] = self.memory[self._slot(span, position)]
        for span in spans:
            for position in range(max(0, span.start - self.apart.window + 1), span.start + len(span.token_ids)):
                held = self.memory_apart[self._slot_apart(span, position)]
                assert held == self.memory[self._slot(span, position)], "a window shows what is not its sequence's"

    def _slot_apart(self, span, position):
        block_id, place = self._slot(span, position)
        companion = self.apart.companions[block_id]
        assert companion != NONE, "a window shows nothing"
        return companion, place

    def _slot(self, span, position):
        return span.block_ids[position // self.block_size], position % self.block_size

    def take_hidden(self, spans):
        """A row is the history up to its token."""
        rows = []
        for span in spans:
            end = span.start + len(span.token_ids)
            slots = self.memory[np.array(span.block_ids)].reshape(-1)[end - span.num_hidden : end]
            rows.append(torch.from_numpy(slots.view(np.int64))[:, None])
        return rows

    def logits_of(self, hidden):
        """Of one token in each row it expects more than of the others."""
        return torch.nn.functional.one_hot(expected_behind(hidden[:, 0], self.vocab_size), self.vocab_size)

    def maxima_of(self, logits):
        return None

    def copy_block(self, source, target):
        assert source != target
        self.memory[target] = self.memory[source]
        if self.apart is not None:
            copied, copy = self.apart.companions[[source, target]]
            assert NONE not in (copied, copy)
            self.memory_apart[copy] = self.memory_apart[copied]
        self.num_copies += 1


class ScriptedPending:
    """The device has the tokens as soon as it is told to sample; the host when it takes them."""

    def __init__(self, token_ids, taken):
        self.token_ids = token_ids
        self._taken = taken

    def take(self):
        self._taken()
        return Sampled(self.token_ids, [None] * len(self.token_ids))


class ScriptedSampler:
    """The next token is a function of (seed, position, history)."""

    def __init__(self, vocab_size=50, window=0):
        """``window``: as the runner's."""
        self.vocab_size, self.window = vocab_size, window
        self.fault = None
        """Called with each row before it is sampled."""
        self.num_untaken = 0
        """Steps whose tokens the host has not read."""

    def start(self, logits, rows, maxima=None):
        assert logits.shape == (len(rows), 1)
        token_ids = []
        for digest, row in zip(logits[:, 0].tolist(), rows, strict=True):
            if self.fault is not None:
                self.fault(row)
            history, expected = history_of(row, self.window)
            assert digest & MASK == expected, "a sequence has read what is not its own history"
            token_ids.append(next_token(history, row.seed, self.vocab_size))
            if not row.draft_token_ids:
                row.state = (*row.state[:-1], token_ids[-1])
        self.num_untaken += 1
        return ScriptedPending(token_ids, self.took)

    def took(self):
        self.num_untaken -= 1


def history_of(row, window=0):
    """The hash of this row's history, and what a forward pass must have read of it."""
    num_seen, digest, history, seen, drawn = row.state or (0, 0, 0, (), None)
    num_prompt_tokens = len(row.prompt_token_ids)
    for position in range(num_seen, num_prompt_tokens + len(row.output_token_ids)):
        is_prompt = position < num_prompt_tokens
        token_id = row.prompt_token_ids[position] if is_prompt else row.output_token_ids[position - num_prompt_tokens]
        if token_id == UNKNOWN:
            token_id = drawn  # only the device knows it yet
        history = following(history, token_id)
        digest, seen = read_on(digest, seen, history, position, window)
        num_seen += 1
    row.state = (num_seen, digest, history, seen, drawn)
    for position, token_id in enumerate(row.draft_token_ids, num_seen):
        history = following(history, token_id)
        digest, seen = read_on(digest, seen, history, position, window)
    return history, digest


def read_on(digest, seen, history, position, window):
    """The digest with one slot more, and without the one that leaves the window; ``seen``: those in it."""
    digest += history * (2 * position + 1)
    if window:
        if len(seen) == window:
            digest -= seen[0] * (2 * (position - window) + 1)
        seen = (*seen, history)[-window:]
    return digest & MASK, seen


def expected_behind(histories, vocab_size):
    """As ``logits_of`` has it; histories [n] i64, which may be below 0."""
    return histories % vocab_size


def scores(prompt_token_ids, vocab_size=50):
    """Of each token of a prompt but the first, how much likelier it is by that than another one: 1 or 0."""
    history, histories = 0, []
    for token_id in prompt_token_ids:
        history = following(history, token_id)
        histories.append(history)
    likely = expected_behind(torch.from_numpy(np.array(histories, dtype=np.uint64).view(np.int64)), vocab_size)
    return [int(token_id == own) for token_id, own in zip(prompt_token_ids[1:], likely.tolist(), strict=False)]


def next_token(history, seed, vocab_size):
    return following(history, seed) % 1009 % vocab_size


def answer(prompt_token_ids, seed, max_tokens, vocab_size=50, eos_token_ids=(0,)):
    """What a request must be answered, whatever happens around it."""
    history = 0
    for token_id in prompt_token_ids:
        history = following(history, token_id)
    token_ids = []
    while len(token_ids) < max_tokens:
        token_ids.append(next_token(history, seed, vocab_size))
        if token_ids[-1] in eos_token_ids:
            break
        history = following(history, token_ids[-1])
    return token_ids
