"""One exchange of the corpus: what is asked, what is answered, and the key by which it is held out or trained on."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

HELD_OUT_SHARE = 16
"""One key in this many is held out."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer.

    `key` names what is held out: the fact or combination itself where the answer must be worked out or copied (two
    operands, a JSON object, the people of a story), otherwise the wording. `always` marks the few
    turns, such as greetings, that are only ever trained on.
    """

    category: str
    question: str
    answer: str
    key: str = ""
    always: bool = False

    @property
    def held_out(self) -> bool:
        return not self.always and is_held_out(self.key or plain(self.question))


def plain(text: str) -> str:
    """The wording with case, punctuation and politeness taken away, so that variants of one question share a key."""
    words = re.sub(r"[^a-z0-9+*/=-]+", " ", text.lower()).split()
    return " ".join(word for word in words if word != "please")


def is_held_out(key: str) -> bool:
    return hashlib.blake2b(key.encode(), digest_size=8).digest()[0] % HELD_OUT_SHARE == 0


def pick(rng: Random, *choices: str) -> str:
    return rng.choice(choices)


def joined(words: Sequence[str]) -> str:
    """`a, b and c`."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def a(noun: str) -> str:
    """The noun with its article."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun
