"""How one model writes: found in its chat template, or said by its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gateway.parsers.calls import Calls, DeepSeek, Hermes, Json, Kimi, Llama, Mistral
from gateway.parsers.marks import Marks, marks_of
from gateway.parsers.reader import Reader, Thinking, Wanted

CALLS: dict[str, Callable[[], Calls]] = {
    "hermes": Hermes,
    "llama": Llama,
    "mistral": Mistral,
    "deepseek": DeepSeek,
    "kimi": Kimi,
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
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|tool_calls_section_begin|>", "kimi"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama"),
    ("<|start_header_id|>", "llama"),
)


class Tongue(NamedTuple):
    """How one model writes reasoning and calls."""

    calls: Calls
    thinking: Thinking | None
    marks: Marks
    knows_tools: bool
    """Its template tells it of tools."""

    def parsers(self, wanted: Wanted | None, prompt_end: str) -> Callable[[], Reader] | None:
        """Makes the parsers of one request's choices; None where all that they say is content. ``prompt_end``: the last
        tokens of its prompt as text, special ones too, since templates may open the reasoning there."""
        if wanted is None and self.thinking is None:
            return None
        is_thinking = self.thinking is not None and prompt_end.rstrip().endswith(self.thinking.opens)
        return lambda: Reader(self.marks, self.thinking, is_thinking, self.calls, wanted)


def tongue_of(
    templates: Sequence[str], specials: Mapping[str, int], calls: str = "auto", thinking: str = "auto"
) -> Tongue:
    """``templates``: all of the model's; ``specials``: its special tokens by name; ``calls`` and ``thinking``: what the
    configuration says, "auto", a name, or for ``thinking`` "none"."""
    source = "\n".join(templates)
    if calls == "auto":
        calls = next((name for word, name in _CALLS_BY_WORD if word in source), "json")
    if thinking == "auto":
        thinking = next((name for name, words in THINKING.items() if words.closes in source), "none")
    form, words = CALLS[calls](), THINKING.get(thinking)
    marks = marks_of([*form.marks, *(words or ())], specials)
    return Tongue(form, words, marks, "tools" in source)
