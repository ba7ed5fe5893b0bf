"""What goes wrong with an adapter's files."""

from policies.terms import printable


class AdapterError(Exception):
    """This adapter cannot be used; the message is one sentence that names it and says why."""

    def __init__(self, sentence: str) -> None:
        super().__init__(printable(sentence))
