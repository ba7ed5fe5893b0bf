"""What has been read of a JSON text: how deep it is, and in which string."""

from __future__ import annotations

import json


class Scan:
    """From the beginning of a text; what is no JSON is read as if it were."""

    __slots__ = ("_is_escaped", "_string", "num_levels")

    def __init__(self) -> None:
        self.num_levels = 0
        """Lists and objects that are open."""
        self._string: bytearray | None = None
        """The one that is open, as it is written."""
        self._is_escaped = False

    def feed(self, data: bytes) -> None:
        """More of it."""
        for byte in data:
            string = self._string
            if string is None:
                if byte == 0x22:
                    self._string = bytearray()
                elif byte in b"[{":
                    self.num_levels += 1
                elif byte in b"]}":
                    self.num_levels -= 1
            elif byte == 0x22 and not self._is_escaped:
                self._string = None
            else:
                string.append(byte)
                self._is_escaped = byte == 0x5C and not self._is_escaped

    def after(self, data: bytes) -> Scan:
        """Another one that has read this too."""
        other = Scan()
        other.num_levels, other._is_escaped = self.num_levels, self._is_escaped
        other._string = None if self._string is None else bytearray(self._string)
        other.feed(data)
        return other

    @property
    def string(self) -> str | None:
        """What the open string says so far; None where there is none, or a character is not whole."""
        if self._string is None:
            return None
        try:
            return str(json.loads(b'"' + bytes(self._string) + b'"'))
        except ValueError:
            return None
