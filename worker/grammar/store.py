"""Grammars on their way from a request to its sequences: compiled beside the step loop, and kept for the next request.

Compiling takes milliseconds, or up to a second where a schema is large, and the vocabulary is read with the first
grammar that is asked for. Whoever asks for one that is there goes on at once.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from threading import Lock

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from policies import wire
from policies.expressions import read
from policies.grammar import MAX_ITEMS, MAX_ROW_ITEMS, NotReadable, marks_in, schemas_of, spelled
from policies.holding import KeptGrammars
from policies.schemas import bound, patterns_of
from policies.widths import width_of
from worker.grammar.ahead import look_ahead
from worker.grammar.aside import Aside, AsideGuide, Rules
from worker.grammar.closing import MAX_MASKS, Ends, TookTooLong, find_end
from worker.grammar.errors import NoVocabulary, Unguided
from worker.grammar.guide import NEVER, PROBES, Guide
from worker.grammar.in_time import InTime, Reach
from worker.grammar.lengths import Counted
from worker.grammar.nodes import KeptMasks
from worker.grammar.places import Places, places_of
from worker.grammar.trail import Trail
from worker.grammar.vocabulary import marks_of, without_marks
from worker.handing import InTurn, handed

MAX_SOURCE_CHARS = 4 << 20
MAX_END_TOKENS = 4096
"""Of the shortest answer that is looked for."""
MAX_LEXER_STATES = 50_000
"""Of one grammar, a kilobyte or two each."""

MAX_END_S = 2.0
"""Of CPU, to look for it."""
MAX_WIDTH = 500
"""Of a schema whose masks are made within the step, see policies.widths: 22 definitions that are each a list of any of
them have masks that take 1 to 5 ms on 150,000 tokens, 30 of them 4 to 40."""

LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)
OF_WRITTEN_RULES = LLParserLimits(
    verbose_errors=False,
    max_lexer_states=MAX_LEXER_STATES,
    max_items_in_row=MAX_ROW_ITEMS,
    step_max_items=MAX_ITEMS,
)
"""To take in a token holds the interpreter, which few items in a row keep short."""

KEPT = KeptGrammars()

_Key = tuple[bytes, wire.Grammar]
"""With the salt of the prefixes: how soon an answer begins must not tell what others' answers are held to."""
Guides = dict[int, Guide]
"""By the index of the sequence."""


@dataclass(slots=True)
class _Compiled:
    rules: Rules
    reach: Reach | None
    places: Places | None
    end: list[int] | None = None
    """Of a strict one: tokens that are a whole answer."""
    is_searched: bool = False
    """For its end, as soon as a request needs one."""

    def needs_end(self, max_tokens: int) -> bool:
        return self.reach is not None and self.reach.needs_end(max_tokens)


class Grammars:
    """Of one model. ``turn`` is for the thread of the step loop, as are ``find``, ``begin`` and ``forget``."""

    def __init__(
        self,
        read: Callable[[], LLTokenizer],
        num_logits: int,
        eos_token_ids: frozenset[int],
        executor: Executor,
        wake: Callable[[], None],
        kept: KeptGrammars = KEPT,
    ) -> None:
        """``read``: as read_vocabulary; ``wake``: has somebody look at ``turn``, called on any thread."""
        self._max_kept, self._max_kept_bytes = kept.max_kept, kept.max_kept_bytes
        self._read, self._num_logits, self._eos_token_ids = read, num_logits, eos_token_ids
        self._threads, self._wake = InTurn(executor), wake
        self._aside = Aside(wake)
        self._lock = Lock()
        self._reading = Lock()
        """Of what takes up to seconds: the step loop never waits for this one."""
        self._vocabulary: LLTokenizer | None = None
        self._marks: frozenset[str] = frozenset()
        self._plain: LLTokenizer | None = None
        """For grammars whose texts say what marks are called, which the other would take for the marks."""
        self._probes: list[int] = []
        self._counted: Counted | None = None
        self._ends: Ends | None = None
        self._masks = KeptMasks()
        self._kept: OrderedDict[_Key, Future[_Compiled]] = OrderedDict()
        self._num_kept_bytes = 0
        self._begun: dict[str, Future[Guides]] = {}
        self.num_compiled = self.num_hits = self.num_refused = 0
        self.compile_s = 0.0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, submit: wire.Submit) -> Guides | None:
        """Of a request whose grammar is there, and that begins here; None: ``begin``."""
        assert submit.grammar is not None
        with self._lock:
            kept = self._kept.get((submit.cache_salt, submit.grammar))
            if (
                kept is None
                or not kept.done()
                or kept.exception() is not None
                or any(submit.emitted_token_ids.values())
            ):
                return None
            self._kept.move_to_end((submit.cache_salt, submit.grammar))
            self.num_hits += 1
        compiled, max_tokens = kept.result(), submit.sampling.max_tokens
        if compiled.rules.lost:
            return None
        if not compiled.needs_end(max_tokens):
            return self._guides(compiled, submit, None)
        is_long = compiled.end is not None and len(compiled.end) > max_tokens
        return None if is_long or not compiled.is_searched else self._guides(compiled, submit, compiled.end)

    def begin(self, submit: wire.Submit) -> None:
        """``turn`` will say what came of it."""
        assert submit.grammar is not None
        prepare = partial(self._prepare, submit)
        if submit.grammar.has_written_rules:
            future = handed(partial(self._aside.submit, tenant=submit.tenant, is_slow=True), prepare)
        else:
            future = handed(partial(self._threads.submit, tenant=submit.tenant), prepare)
        self._begun[submit.request_id] = future
        future.add_done_callback(lambda done: self._wake())

    def turn(self) -> list[tuple[str, Guides | Unguided]]:
        """What has come of requests since the last call."""
        done = [request_id for request_id, future in self._begun.items() if future.done()]
        found = [(request_id, _outcome(self._begun.pop(request_id))) for request_id in done]
        self.num_refused += sum(isinstance(each, Unguided) for _, each in found)
        return found

    def counts(self) -> dict[str, float]:
        """What a worker's ``Stats`` say of them, by field."""
        return {
            "num_grammars": len(self._kept),
            "num_grammars_compiled": self.num_compiled,
            "grammar_compile_s": self.compile_s,
            "num_grammar_hits": self.num_hits,
            "num_grammars_refused": self.num_refused,
        }

    def forget(self, request_id: str) -> None:
        """Nobody waits for this one any more."""
        future = self._begun.pop(request_id, None)
        if future is not None:
            future.cancel()

    # On the executor's threads

    def _prepare(self, submit: wire.Submit) -> Guides:
        assert submit.grammar is not None
        compiled, max_tokens = self._compiled((submit.cache_salt, submit.grammar)), submit.sampling.max_tokens
        if compiled.rules.lost:
            raise Unguided(f"the grammar cannot be followed: {compiled.rules.lost}")
        end = None
        reach = compiled.reach
        if reach is not None and reach.needs_end(max_tokens):
            if not compiled.is_searched:
                compiled.end, compiled.is_searched = self._end_of(compiled.rules.matcher, reach, MAX_END_TOKENS), True
            end = compiled.end
            if end is not None and len(end) > max_tokens:
                end = self._end_of(compiled.rules.matcher, reach, max_tokens)
        guides = self._guides(compiled, submit, end)
        for index, token_ids in submit.emitted_token_ids.items():
            if not guides[index].replay(token_ids, max_tokens, index in submit.cut_indices):
                raise Unguided(f"what was emitted of sequence {index} is no beginning of what its grammar allows")
        return guides

    @staticmethod
    def _end_of(matcher: LLMatcher, reach: Reach, max_tokens: int) -> list[int] | None:
        asked = matcher.deep_copy(), reach.ends, max_tokens, MAX_MASKS, reach.scan(), reach.expressions
        try:
            return find_end(*asked, MAX_END_S)
        except TookTooLong:
            return None

    def _guides(self, compiled: _Compiled, submit: wire.Submit, end: list[int] | None) -> Guides:
        return {index: self._guide(compiled, submit, end) for index in submit.indices}

    def _guide(self, compiled: _Compiled, submit: wire.Submit, end: list[int] | None) -> Guide:
        asked = submit.sampling
        own_stops = frozenset(asked.stop_token_ids)
        rules, reach, stops = compiled.rules, compiled.reach, self._eos_token_ids | own_stops
        trail, vocabulary, in_time = Trail(rules.matcher.deep_copy()), rules.vocabulary, None
        if reach is not None:
            in_time = InTime(reach, None if end is None else list(end), trail, stops, vocabulary)
        if rules.is_aside:
            return AsideGuide(rules, trail, stops, submit.tenant, asked.max_tokens, in_time)
        is_filtered = asked.temperature > 0 and (asked.top_k or asked.top_p < 1.0 or asked.min_p)
        free_from = NEVER if is_filtered else asked.min_tokens
        known = self._probes, compiled.places
        return Guide(trail, vocabulary, self._eos_token_ids, own_stops, in_time, *known, free_from, rules)

    def _compiled(self, key: _Key) -> _Compiled:
        """Kept, or compiled now by whoever asks first."""
        _, grammar = key
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                own = self._kept[key] = Future[_Compiled]()
                self._num_kept_bytes += _num_bytes(grammar)
                while len(self._kept) > self._max_kept or (
                    self._num_kept_bytes > self._max_kept_bytes and len(self._kept) > 1
                ):
                    (_, gone), _ = self._kept.popitem(last=False)
                    self._num_kept_bytes -= _num_bytes(gone)
        if kept is not None:
            return kept.result()
        try:
            compiled = self._compile(grammar)
        except BaseException as error:
            own.set_exception(error)
            with self._lock:
                if self._kept.get(key) is own:
                    del self._kept[key]
                    self._num_kept_bytes -= _num_bytes(grammar)
            raise
        own.set_result(compiled)
        return compiled

    def _compile(self, grammar: wire.Grammar) -> _Compiled:
        began_at = time.monotonic()
        vocabulary = self._tokens()
        if len(grammar.source) > MAX_SOURCE_CHARS:
            raise Unguided(f"the grammar has {len(grammar.source)} characters; {MAX_SOURCE_CHARS} are allowed")
        if not self._marks.isdisjoint(marks_in(grammar)):
            vocabulary = self._plain_tokens(vocabulary)
        try:
            text = spelled(grammar)
        except NotReadable as error:
            raise Unguided(f"the grammar cannot be read: {error}") from None
        is_written = grammar.has_written_rules
        matcher = LLMatcher(vocabulary, text, log_level=0, limits=OF_WRITTEN_RULES if is_written else LIMITS)
        # What is too much for its bounds shows here, and not in the middle of everybody's step.
        rules = Rules(vocabulary, matcher, self._aside, is_written or _is_wide(grammar))
        if is_written:
            self._count(began_at)
            return _Compiled(rules, None, None)
        reach, places = None, None
        if not rules.is_aside:
            places = places_of(grammar, vocabulary, self._masks, self._probes, self._counted)
        if places is not None and self._counted is not None:
            look_ahead(places, matcher, vocabulary, self._counted)
        if grammar.is_strict:
            expressions = read(patterns_of(schemas_of(grammar)))
            reach = Reach(self._ends_of(vocabulary), bound(grammar), expressions)
        self._count(began_at)
        return _Compiled(rules, reach, places)

    def _count(self, began_at: float) -> None:
        with self._lock:
            self.num_compiled += 1
            self.compile_s += time.monotonic() - began_at

    def _tokens(self) -> LLTokenizer:
        with self._reading:
            if self._vocabulary is None:
                try:
                    self._vocabulary = self._read()
                except NoVocabulary as error:
                    raise Unguided(f"this model's answers cannot be held to a grammar: {error}") from error
                probes = [self._vocabulary.tokenize_bytes(probe) for probe in PROBES]
                self._probes = [found[0] for found in probes] if all(probes) else []
                self._counted = Counted.of(self._vocabulary)
                self._marks = marks_of(self._vocabulary)
            return self._vocabulary

    def _plain_tokens(self, vocabulary: LLTokenizer) -> LLTokenizer:
        with self._reading:
            if self._plain is None:
                self._plain = without_marks(vocabulary)
            return self._plain

    def _ends_of(self, vocabulary: LLTokenizer) -> Ends:
        with self._reading:
            if self._ends is None:
                self._ends = Ends(vocabulary, self._num_logits)
            return self._ends


def _is_wide(grammar: wire.Grammar) -> bool:
    """A mask of it may take long, which would not show before an answer comes to it."""
    widths = map(width_of, schemas_of(grammar))
    return any(width.num > MAX_WIDTH or not width.is_whole for width in widths)


def _num_bytes(grammar: wire.Grammar) -> int:
    return len(grammar.source.encode("utf-8", "surrogatepass"))


def _outcome(future: Future[Guides]) -> Guides | Unguided:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, Unguided):
        return error
    return Unguided(f"its grammar could not be made ready: {type(error).__name__}: {error}")
