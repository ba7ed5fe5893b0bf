"""How one model writes: found in its chat template, or said by its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gateway.parsers import Parser
from gateway.parsers.calls import Calls, DeepSeek, Hermes, Json, Kimi, Llama, Mistral
from gateway.parsers.custom import Customs
from gateway.parsers.grammars import Held, Words, grammar_of, is_mark, words_of
from gateway.parsers.harmony import Channels, Harmony
from gateway.parsers.marks import Marks, marks_of
from gateway.parsers.reader import Reader, Thinking, Wanted
from gateway.parsers.tagged import Glm, Tagged
from policies import wire

CALLS: dict[str, Callable[[], Calls]] = {
    "hermes": Hermes,
    "llama": Llama,
    "mistral": Mistral,
    "deepseek": DeepSeek,
    "kimi": Kimi,
    "tagged": Tagged,
    "glm": Glm,
    "harmony": Harmony,
    "json": Json,
}
"""By the names that ``models.NAME.tool_parser`` takes."""
THINKING = {
    "think": Thinking("<think>", "</think>"),
    "mistral": Thinking("[THINK]", "[/THINK]"),
    "seed": Thinking("<seed:think>", "</seed:think>"),
}
"""By the names that ``models.NAME.reasoning_parser`` takes."""
# The first whose word is in a template; Llama's comes late, as its header is in many that were made after it.
_CALLS_BY_WORD = (
    ("<|channel|>", "harmony"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|tool_calls_section_begin|>", "kimi"),
    ("<function=", "tagged"),
    ("<arg_key>", "glm"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama"),
    ("<|start_header_id|>", "llama"),
)


class Tongue(NamedTuple):
    """How one model writes reasoning and calls."""

    calls: Calls
    thinking: Thinking | None
    marks: Marks
    words: Words
    knows_tools: bool
    """Its template tells it of tools."""

    def is_thinking(self, prompt_end: str) -> bool:
        """Whether the prompt has opened the reasoning; ``prompt_end``: its last tokens as text, special ones too."""
        return self.thinking is not None and prompt_end.rstrip().endswith(self.thinking.opens)

    def parsers(self, wanted: Wanted | None, is_thinking: bool) -> Callable[[], Parser] | None:
        """Makes the parsers of one request's choices; None where all that they say is content. ``is_thinking``: its
        prompt has opened the reasoning."""
        if wanted is not None and wanted.custom:
            return lambda: Customs(self._parser(wanted, is_thinking), wanted.custom)
        if wanted is None and self.thinking is None and not isinstance(self.calls, Harmony):
            return None
        return lambda: self._parser(wanted, is_thinking)

    def _parser(self, wanted: Wanted | None, is_thinking: bool) -> Parser:
        if isinstance(self.calls, Harmony):
            return Channels(self.marks, self.calls, wanted)
        return Reader(self.marks, self.thinking, is_thinking, self.calls, wanted)

    def grammar(self, held: Held | None, content: wire.Grammar | None, is_thinking: bool) -> wire.Grammar | None:
        """What the whole answer must be, its reasoning included; None: anything. ``content``: what its text must be."""
        return grammar_of(self.words, self.calls, self.thinking, is_thinking, held, content)


def tongue_of(
    templates: Sequence[str], added: Mapping[str, tuple[int, bool]], calls: str = "auto", thinking: str = "auto"
) -> Tongue:
    """``templates``: all of the model's; ``added``: its added tokens by name, with their ids and whether they are
    special; ``calls`` and ``thinking``: what the configuration says, "auto", a name, or for ``thinking`` "none"."""
    source = "\n".join(templates)
    if calls == "auto":
        calls = next((name for word, name in _CALLS_BY_WORD if word in source), "json")
    if thinking == "auto":
        thinking = next((name for name, words in THINKING.items() if words.closes in source), "none")
    form, words = CALLS[calls](), THINKING.get(thinking)
    names = [*form.marks, *(words or ())]
    marks = marks_of(names, {name: token_id for name, (token_id, is_special) in added.items() if is_special})
    tokens = {name: token_id for name, (token_id, is_special) in added.items() if is_mark(name, is_special)}
    return Tongue(form, words, marks, words_of(names, tokens), "tools" in source)
