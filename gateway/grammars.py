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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from gateway.errors import ServiceUnavailable
from gateway.openai import AskedGrammar, Malformed
from policies import wire
from policies.grammar import NotReadable, read_schema, spelled

MAX_CHARS = 1 << 20
"""Of a grammar's source."""
MAX_REMEMBERED, MAX_REMEMBERED_CHARS = 1024, 16 << 20
MAX_WAITING = 256
FINDING_S = 1.0
"""How long the part of a schema that is at fault is looked for."""
_NO_SPECIALS = "unknown special token"


class _Fault(Exception):
    """What is wrong, and the path of the part below the source."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class Grammars:
    """Not safe for two event loops."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._num_waiting = 0
        self._vocabulary: LLTokenizer | None = None
        self._known: OrderedDict[wire.Grammar, wire.Grammar | _Fault] = OrderedDict()
        self._num_known_chars = 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def checked(self, asked: AskedGrammar | None) -> wire.Grammar | None:
        """As a worker understands it. Raises Malformed."""
        if asked is None:
            return None
        grammar, param = asked
        if len(grammar.source) > MAX_CHARS:
            raise Malformed(
                f"Invalid '{param}': it has {len(grammar.source)} characters, and {MAX_CHARS} are allowed",
                param,
                "string_above_max_length",
            )
        found = self._known.get(grammar)
        if found is None:
            if self._num_waiting >= MAX_WAITING:
                raise ServiceUnavailable("Too many grammars wait to be read. Please try again.", retry_after_s=1.0)
            self._num_waiting += 1
            try:
                found = await asyncio.get_running_loop().run_in_executor(self._threads, self._read, grammar)
            finally:
                self._num_waiting -= 1
            self._remember(grammar, found)
        else:
            self._known.move_to_end(grammar)
        if isinstance(found, _Fault):
            path = param + found.path
            raise Malformed(f"Invalid '{path}': {found}", path, "invalid_value")
        return found

    def _remember(self, grammar: wire.Grammar, found: wire.Grammar | _Fault) -> None:
        if grammar in self._known:
            return
        self._known[grammar] = found
        self._num_known_chars += len(grammar.source)
        while len(self._known) > MAX_REMEMBERED or self._num_known_chars > MAX_REMEMBERED_CHARS:
            gone, _ = self._known.popitem(last=False)
            self._num_known_chars -= len(gone.source)

    # On the thread

    def _read(self, grammar: wire.Grammar) -> wire.Grammar | _Fault:
        if self._vocabulary is None:
            self._vocabulary = LLTokenizer(TokenizerWrapper(_Bytes()))
        try:
            if grammar.kind == "lark" and "::=" in grammar.source:
                grammar = wire.Grammar("lark", any_to_lark(grammar.source), grammar.is_strict)
            text = spelled(grammar)
        except NotReadable as error:
            return _Fault(str(error))
        except Exception as error:  # the translation raises whatever comes
            return _Fault(f"it cannot be read as GBNF: {_line(str(error))}")
        said = self._error(text)
        if not said or (grammar.kind == "lark" and _NO_SPECIALS in said):
            return grammar
        if grammar.kind == "json_schema":
            return _Finder(self._error, read_schema(grammar.source), grammar.is_strict).fault(said)
        return _Fault(f"it cannot be compiled: {_line(said)}")

    def _error(self, text: str) -> str:
        """Of compiling it and of its first mask; empty where it can be used."""
        assert self._vocabulary is not None
        matcher = LLMatcher(self._vocabulary, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
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

    def fault(self, error: str) -> _Fault:
        """``error``: of the whole."""
        self._until = time.monotonic() + FINDING_S
        node, pointer, path = self._schema, "", ""
        while True:
            for step, below, child in _parts(node):
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
        return _Fault(f"it cannot be compiled: {_line(error)}", path + (f".{keyword}" if keyword else ""))

    def _error_at(self, pointer: str) -> str:
        alone = {"$defs": {"root": self._root}, "$ref": f"#/$defs/root{pointer}"}
        return str(self._error_of(spelled(wire.Grammar("json_schema", json.dumps(alone), self._is_strict))))


_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_ONES = (
    "items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else",
)  # fmt: skip


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Schemas inside of a schema: the step of a JSON pointer to each, and the same as a path."""
    for word in _MAPS:
        inner = schema.get(word)
        for name, child in inner.items() if isinstance(inner, dict) else ():
            if isinstance(child, dict):
                yield f"/{word}/{name.replace('~', '~0').replace('/', '~1')}", f".{word}.{name}", child
    for word in _LISTS:
        inner = schema.get(word)
        for place, child in enumerate(inner) if isinstance(inner, list) else ():
            if isinstance(child, dict):
                yield f"/{word}/{place}", f".{word}[{place}]", child
    for word in _ONES:
        child = schema.get(word)
        if isinstance(child, dict):
            yield f"/{word}", f".{word}", child


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


def _line(error: str) -> str:
    """As part of a sentence."""
    return re.sub(r"\s+", " ", error.replace("<non-verbose/>", "")).strip()[:300]
