"""What a key may not do that its tenant may, as the store has it in words."""

from __future__ import annotations

import ipaddress

import msgspec

from policies.policy import Budget, Narrowing

MAX_KNOWN = 10_000
"""Restrictions, or policies that they narrow, that are kept made."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Scopes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a key is good for."""

    endpoints: tuple[str, ...] | None = None
    """Such as "chat.completions"; None: all of them."""


EVERYTHING = Scopes()


class Restriction(msgspec.Struct, frozen=True, gc=False):
    """What a key may not do that its tenant may. Keys with the same words share one."""

    scopes: Scopes
    networks: tuple[Network, ...]
    """Where its requests may come from; empty: anywhere."""
    narrowing: str
    """The JSON of a ``Narrowing``; empty: none."""
    budget: Budget | None
    """Its."""


class Restrictions:
    """Those that were needed lately."""

    def __init__(self) -> None:
        self._known: dict[tuple[str | None, str | None, str | None], Restriction] = {}

    def of(self, scopes: str | None, networks: str | None, narrowing: str | None) -> Restriction:
        """The one with these words, as columns of a key have them. Raises ValueError when they are none."""
        words = (scopes, networks, narrowing)
        known = self._known.get(words)
        if known is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            budget = msgspec.json.decode(narrowing, type=Narrowing).budget if narrowing else None
            known = self._known[words] = Restriction(
                msgspec.json.decode(scopes, type=Scopes) if scopes else EVERYTHING,
                tuple(map(ipaddress.ip_network, msgspec.json.decode(networks or "[]", type=list[str]))),
                narrowing or "",
                budget,
            )
        return known
