"""What can go wrong with grammars. Imports nothing of llguidance."""


class GuideLost(Exception):
    """This answer's grammar cannot be followed any further."""


class Unguided(Exception):
    """This request's answers cannot be held to its grammar; one sentence says why."""


class NoVocabulary(Exception):
    """Answers of this model cannot be held to a grammar; one sentence says why."""
