"""Tokens that are the same word, with a space before it and without: a copy has one where its source has the other."""

from __future__ import annotations

import re
from collections.abc import Mapping

_WORD = re.compile(rb"[0-9A-Za-z\x80-\xff]")


class Twins:
    """Of one vocabulary."""

    def __init__(self, spelt: Mapping[int, bytes] | None = None) -> None:
        """``spelt``: the bytes of each token; without, none has a twin."""
        spelt = spelt or {}
        ids = {spelling: token_id for token_id, spelling in spelt.items()}
        self._plain = {
            token_id: ids[spelling[1:]]
            for token_id, spelling in spelt.items()
            if spelling.startswith(b" ") and spelling[1:] in ids
        }
        """Of each that begins with a space the one without."""
        self._spaced = {plain: token_id for token_id, plain in self._plain.items()}
        self._marks = {token_id for token_id, spelling in spelt.items() if not _WORD.search(spelling)}

    def is_word(self, token_id: int) -> bool:
        """There are letters or digits in it; as far as is known."""
        return token_id not in self._marks

    def plain(self, token_id: int) -> int:
        """Without a space."""
        return self._plain.get(token_id, token_id)

    def alike(self, token_id: int, source: int, copy: int) -> int:
        """This token, copied as ``copy`` was from ``source``: the space goes, or comes, or stays."""
        if source == copy:
            return token_id
        return self._spaced.get(token_id, token_id) if self.plain(copy) == source else self.plain(token_id)
