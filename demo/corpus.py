"""The corpus: conversations and plain pages, drawn from a seed, in a training part and a held-out part.

Held out are one in `HELD_OUT_SHARE` (16) of the keys of `Turn`: pairs of operands (with every wording, in both orders),
JSON objects, tool arguments, lists to repeat, sort or reverse, the people and things of a reading, animal and
thing of a story; and of everything else, wordings of a question. No training text contains a held-out turn.
Products are the exception that is no real test: whole times tables are written out in the training part.
Owns the mixture; the kinds of turn are in the modules beside it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from demo.stories import story_turn
from demo.sums import drill, sum_turns
from demo.talk import talk_turns
from demo.tools import Message, json_turn, no_tool_turn, tool_conversation
from demo.turns import Turn, is_held_out, pick
from demo.valley import memory, reading, valley_page, valley_turn

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are the Penstock demo model.",
    "You are a friendly assistant that answers in simple English.",
    "Answer briefly.",
    "You are a helpful, honest assistant.",
    "Be polite and answer the question.",
    "You are an assistant on a small computer.",
)


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation, or a plain page when it has no messages."""

    category: str
    messages: list[Message] = field(default_factory=list)
    tools: list[Message] | None = None
    page: str = ""


# With tools at hand these would be asked of a tool, or are about one that is missing.
NEEDING_TOOLS = frozenset({"plus and minus", "times", "memory", "no tool"})

# Their answers copy words of the question, capitals and all.
COPYING = frozenset(
    {"json", "repeat", "case", "reverse", "first and last", "reading", "memory", "word problem", "lists"}
)


def varied(rng: Random, question: str, copied: bool) -> str:
    """The question as people type it: polite, without its last mark, and in lower case unless it is copied from."""
    form = rng.random()
    if form < 0.55:
        return question
    if form < 0.65 and question.endswith((".", "?")) and "\n" not in question and '"' not in question:
        if question.endswith("?"):
            return question[:-1]
        return pick(rng, "Please " + question[0].lower() + question[1:], question[:-1] + ", please.")
    if form < 0.8:
        return question.rstrip(".?!") or question
    if copied:
        return question
    return question.lower() if form < 0.9 else question.lower().rstrip(".?!") or question


def draw_turn(rng: Random) -> Turn:
    makers = (talk_turns, sum_turns, valley_turn, reading, json_turn, story_turn, no_tool_turn)
    return rng.choices(makers, (10, 9, 3, 4, 2, 1.6, 0.5))[0](rng)


def turn_of(rng: Random, held_out: bool) -> Turn:
    while (turn := draw_turn(rng)).held_out != held_out:
        pass
    return turn


def conversation(rng: Random, held_out: bool) -> Sample:
    """One to four turns, perhaps behind a system prompt; in the held-out part, one turn alone."""
    system: list[Message] = []
    if rng.random() < 0.25:
        system = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}]
    form = rng.random()
    if form < 0.07:
        while True:
            key, called, tools = tool_conversation(rng)
            if is_held_out(key) == held_out:
                return Sample("tool calls", system + called, tools)
    turns = [turn_of(rng, held_out)]
    if form < 0.13:
        while True:
            first, last = memory(rng)
            if first.held_out == held_out:
                middle = [turn_of(rng, False) for _ in range(rng.randint(0, 2))]
                turns = [first, *([] if held_out else middle), last]
                break
    elif form < 0.5 and not held_out:
        turns += [turn_of(rng, held_out) for _ in range(rng.randint(1, 3))]
    messages: list[Message] = []
    for turn in turns:
        messages.append({"role": "user", "content": varied(rng, turn.question, turn.category in COPYING)})
        messages.append({"role": "assistant", "content": turn.answer})
    # Tools that are there but not needed: the model answers by itself.
    offered = None
    if rng.random() < 0.04 and turns[-1].category not in NEEDING_TOOLS:
        offered = tool_conversation(rng)[2]
    return Sample(turns[-1].category, system + messages, offered)


def page(rng: Random) -> Sample:
    """Plain text of the training part: a story, a page about the valley, or a page of sums."""
    form = rng.random()
    if form < 0.6:
        return Sample("page", page=drill(rng))
    if form < 0.75:
        return Sample("page", page=valley_page(rng))
    while (turn := story_turn(rng)).held_out:
        pass
    return Sample("page", page=turn.answer)


def samples(seed: int, held_out: bool = False) -> Iterator[Sample]:
    """An endless stream, the same for the same seed. The held-out part has no plain pages."""
    rng = Random(f"{seed} {held_out}")
    while True:
        yield page(rng) if not held_out and rng.random() < 0.06 else conversation(rng, held_out)
