"""What can be wrong with a model."""

from __future__ import annotations

from policies.terms import printable


class ModelError(Exception):
    """This model cannot be served here; the message is one sentence for the operator that names what is missing or
    wrong.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(printable(sentence))
