"""Custom tools: they are given a text rather than arguments, any text or one in a grammar."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.parsers.custom import ARGUMENT, PARAMETERS
from policies import wire

Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}$(?!\n)")]
"""Of a tool. OpenAI's own end at 64 and Anthropic's at 128, which names that are made of a server's and a tool's do
reach; what one client may call, all may."""


class AnyText(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Whatever a model writes."""


class Definition(msgspec.Struct, frozen=True):
    """A grammar of one's own."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Meta(min_length=1)]


class InGrammar(msgspec.Struct, frozen=True, tag_field="type", tag="grammar"):
    """A text of this language."""

    grammar: Definition


class Custom(msgspec.Struct, frozen=True):
    """What can be called. Without ``format``: with any text."""

    name: Name
    description: str | None = None
    format: AnyText | InGrammar | None = None

    @property
    def grammar(self) -> wire.Grammar | None:
        """What its input must be."""
        if not isinstance(self.format, InGrammar):
            return None
        return wire.Grammar(self.format.grammar.syntax, self.format.grammar.definition)

    @property
    def parameters(self) -> dict[str, Any]:
        """As if it were a function."""
        grammar = self.grammar
        if grammar is None:
            return PARAMETERS
        kind = "matches this regular expression" if grammar.kind == "regex" else "follows this Lark grammar"
        text = {"type": "string", "description": f"Text that {kind}:\n{grammar.source}"}
        return {**PARAMETERS, "properties": {ARGUMENT: text}}
