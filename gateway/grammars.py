"""Whether a grammar can be read, before a worker is asked to hold an answer to it.

A grammar is compiled for a vocabulary of single bytes, on a thread, within llguidance's bounds of work and memory; what
was found is remembered. What depends on the model's own tokens, the names of special ones, its worker finds out.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Generic, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from gateway.errors import ServiceUnavailable
from gateway.openai import AskedGrammar, Malformed
from gateway.schemas import Fault, conjunctions_fault, fault_of, parts_of, schemas_in, unbounded_fault
from gateway.turns import Turns
from policies import holding, wire
from policies.grammar import MAX_ITEMS, MAX_ROW_ITEMS, NotReadable, read_schema, spelled

DEFAULTS = holding.Grammars()
LIMITS = LLParserLimits(verbose_errors=False)
OF_WRITTEN_RULES = LLParserLimits(verbose_errors=False, max_items_in_row=MAX_ROW_ITEMS, step_max_items=MAX_ITEMS)
WAITING_S = 10.0
"""Until a thread is free for one."""
FINDING_S = 1.0
"""How long the part of a schema that is at fault is looked for."""
_NO_SPECIALS = "unknown special token"

T = TypeVar("T")
_Key = tuple[str, wire.Grammar]
"""A tenant, and what it asked for."""


class Remembered(Generic[T]):
    """What was found for a model's tongue, by the digest of what else it depends on; what was used longest ago is
    forgotten first."""

    def __init__(self, max_known: int, max_known_bytes: int) -> None:
        self._most, self._most_bytes = max_known, max_known_bytes
        self._known: OrderedDict[bytes, tuple[object, T, int]] = OrderedDict()
        self._num_bytes = 0

    def find(self, digest: bytes, tongue: object) -> T | None:
        """None where it has to be found out, as another ``tongue`` has been when it was."""
        known = self._known.get(digest)
        if known is None or known[0] is not tongue:
            return None
        self._known.move_to_end(digest)
        return known[1]

    def put(self, digest: bytes, tongue: object, found: T, num_bytes: int = 0) -> None:
        _, _, before = self._known.pop(digest, (None, None, 0))
        self._known[digest] = tongue, found, num_bytes
        self._num_bytes += num_bytes - before
        while len(self._known) > self._most or self._num_bytes > self._most_bytes:
            _, (_, _, gone) = self._known.popitem(last=False)
            self._num_bytes -= gone


@dataclass(slots=True)
class _Asked:
    """A grammar that is being read, or waits to be."""

    reading: asyncio.Task[wire.Grammar | Fault]
    num: int = 0
    """Who wait for it."""


class Grammars:
    """Not safe for two event loops."""

    def __init__(self, settings: holding.Grammars = DEFAULTS) -> None:
        self._settings = settings
        self._turns = Turns(settings.num_threads, "grammars", "Too many grammars wait to be read. Please try again.")
        self._lock = Lock()
        self._vocabulary: LLTokenizer | None = None
        self._asked: dict[_Key, _Asked] = {}
        self._known: OrderedDict[_Key, wire.Grammar | Fault] = OrderedDict()
        """By tenant: how soon an answer begins must not tell what somebody else asked for."""
        self._num_known_bytes = 0
        self.strict: Remembered[frozenset[str]] = Remembered(settings.max_known, settings.max_known_bytes)
        """Of functions that may be, the names of those that can."""
        self.whole: Remembered[wire.Grammar] = Remembered(settings.max_known, settings.max_known_bytes)
        """Of answers whose calls are held to something."""
        self.num_read = self.num_known_hits = self.num_refused = 0
        self.read_s = 0.0

    def close(self) -> None:
        self._turns.close()

    async def checked(self, asked: AskedGrammar | None, tenant_id: str = "") -> wire.Grammar | None:
        """As a worker understands it. Raises Malformed."""
        if asked is None:
            return None
        grammar, param = asked
        num_bytes = _num_bytes(grammar)
        if num_bytes > self._settings.max_bytes:
            self.num_refused += 1
            raise Malformed(
                f"Invalid '{param}': it has {num_bytes} bytes, and {self._settings.max_bytes} are allowed",
                param,
                "string_above_max_length",
            )
        key = tenant_id, grammar
        found = self._known.get(key)
        if found is None:
            found = await self._found(key)
            self._remember(key, found, num_bytes)
        else:
            self.num_known_hits += 1
            self._known.move_to_end(key)
        if isinstance(found, Fault):
            self.num_refused += 1
            path = param + found.path
            raise Malformed(f"Invalid '{path}': {found}", path, "invalid_value")
        return found

    async def _found(self, key: _Key) -> wire.Grammar | Fault:
        """Once for all of its tenant who ask for it meanwhile, until nobody does any more."""
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = _Asked(asyncio.create_task(self._in_time(*key)))
        asked.num += 1
        try:
            return await asyncio.shield(asked.reading)
        finally:
            asked.num -= 1
            if not asked.num:
                del self._asked[key]
                asked.reading.cancel()

    async def _in_time(self, tenant_id: str, grammar: wire.Grammar) -> wire.Grammar | Fault:
        """That others take their time is no fault of a grammar that waits for them."""
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(WAITING_S):
                await self._turns.turn(tenant_id)
        except TimeoutError:
            raise ServiceUnavailable(
                "Others' grammars take long to be read. Please try again.", retry_after_s=1.0
            ) from None
        reading = self._turns.start(tenant_id, partial(self._counted, grammar, asked_at))
        try:
            return await asyncio.wait_for(reading, self._settings.compile_s)
        except TimeoutError:
            return Fault(f"it could not be read within {self._settings.compile_s:g} s")

    def _remember(self, key: _Key, found: wire.Grammar | Fault, num_bytes: int) -> None:
        if key in self._known:
            return
        self._known[key] = found
        self._num_known_bytes += num_bytes
        most, most_bytes = self._settings.max_known, self._settings.max_known_bytes
        while self._known and (len(self._known) > most or self._num_known_bytes > most_bytes):
            (_, gone), _ = self._known.popitem(last=False)
            self._num_known_bytes -= _num_bytes(gone)

    # On the thread

    def _counted(self, grammar: wire.Grammar, asked_at: float) -> wire.Grammar | Fault:
        try:
            return self._read(grammar)
        finally:
            with self._lock:
                self.num_read += 1
                self.read_s += time.monotonic() - asked_at

    def _read(self, grammar: wire.Grammar) -> wire.Grammar | Fault:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = LLTokenizer(TokenizerWrapper(_Bytes()))
        try:
            if grammar.kind == "lark" and "::=" in grammar.source:
                grammar = wire.Grammar("lark", any_to_lark(grammar.source), grammar.is_strict)
            text = spelled(grammar)
        except NotReadable as error:
            return Fault(str(error))
        except Exception as error:  # the translation raises whatever comes
            return Fault(f"it cannot be read as GBNF: {_line(str(error))}")
        if grammar.kind == "json_schema" and (fault := fault_of(read_schema(grammar.source), grammar.is_strict)):
            return fault
        if grammar.kind == "lark":
            if fault := conjunctions_fault(grammar.source):
                return fault
            for fault in filter(None, map(unbounded_fault, schemas_in(grammar.source))):
                return Fault(f"it cannot be compiled: {fault}")
        said = self._error(text, OF_WRITTEN_RULES if grammar.has_written_rules else LIMITS)
        if not said or (grammar.kind == "lark" and _NO_SPECIALS in said):
            return grammar
        if grammar.kind == "json_schema":
            return _Finder(self._error, read_schema(grammar.source), grammar.is_strict).fault(said)
        return Fault(f"it cannot be compiled: {_line(said)}")

    def _error(self, text: str, limits: LLParserLimits = LIMITS) -> str:
        """Of compiling it and of its first mask; empty where it can be used."""
        assert self._vocabulary is not None
        matcher = LLMatcher(self._vocabulary, text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher.get_error()


class _Bytes:
    """A vocabulary of single bytes, for llguidance."""

    eos_token_id, bos_token_id = 256, None
    special_token_ids = (256,)

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"\xff<end>"]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class _Finder:
    """Finds the part of a schema that cannot be compiled: the innermost one that cannot be compiled by itself."""

    def __init__(self, error_of: Any, schema: dict[str, Any], is_strict: bool) -> None:
        self._error_of, self._is_strict = error_of, is_strict
        self._schema = schema
        self._root = _moved(schema)
        self._until = 0.0

    def fault(self, error: str) -> Fault:
        """``error``: of the whole."""
        self._until = time.monotonic() + FINDING_S
        node, pointer, path = self._schema, "", ""
        while True:
            for step, below, child in parts_of(node):
                if time.monotonic() > self._until:
                    break
                inner = self._error_at(pointer + step)
                if inner:
                    node, pointer, path, error = child, pointer + step, path + below, inner
                    break
            else:
                break
            if time.monotonic() > self._until:
                break
        keyword = _keyword(node, error)
        return Fault(f"it cannot be compiled: {_line(error)}", path + (f".{keyword}" if keyword else ""))

    def _error_at(self, pointer: str) -> str:
        alone = {"$defs": {"root": self._root}, "$ref": f"#/$defs/root{pointer}"}
        return str(self._error_of(spelled(wire.Grammar("json_schema", json.dumps(alone), self._is_strict))))


def _moved(value: Any) -> Any:
    """The same with references that hold where it is a definition among others."""
    if isinstance(value, list):
        return [_moved(each) for each in value]
    if not isinstance(value, dict):
        return value
    moved = {name: _moved(each) for name, each in value.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = "#/$defs/root" + reference[1:]
    return moved


def _keyword(schema: dict[str, Any], error: str) -> str:
    """The word of a schema that an error is about, as far as it can be told."""
    if named := re.search(r'Unimplemented keys: \["([^"]*)"', error):
        return named[1] if named[1] in schema else ""
    hints = (
        ("oneOf", "oneOf"), ("regex", "pattern"), ("format", "format"), ("Invalid type", "type"), ("Pointer", "$ref"),
        ("enum", "enum"), ("multipleOf", "multipleOf"),
    )  # fmt: skip
    return next((word for hint, word in hints if hint in error and word in schema), "")


def _num_bytes(grammar: wire.Grammar) -> int:
    return len(grammar.source.encode("utf-8", "surrogatepass"))


def _line(error: str) -> str:
    """As part of a sentence."""
    return re.sub(r"\s+", " ", error.replace("<non-verbose/>", "")).strip()[:300]
