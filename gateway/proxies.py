"""Whose request it is when a proxy brings it: only proxies of the operator's own networks are believed."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from aiohttp import web

from policies.settings import Server

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_PAIR = re.compile(r'\s*+([A-Za-z]++)\s*+=\s*+("(?:[^"\\]|\\.)*+"|[^\s;,"]*+)\s*+')
_QUOTES = re.compile(r'[^"]*+(?:"(?:[^"\\]|\\.)*+"[^"]*+)*+')
"""As far as they are closed."""
_PORT = re.compile(r"\[(?P<six>[^\]]*)\](?::\d+)?|(?P<four>[\d.]+):\d+")


class Proxies:
    """Those that are believed."""

    def __init__(self, config: Server) -> None:
        self._networks = [ipaddress.ip_network(network) for network in config.trusted_proxies]
        self._header = config.forwarded_header

    def address_of(self, request: web.Request) -> str | None:
        """The address of the client: the last one in the chain that is no proxy of ours. None where there is none, as
        on a Unix socket.

        Each proxy adds to the end whom it was asked by, so the chain is read backwards, and what comes before an
        address that is not believed is a stranger's word.
        """
        nearest = request.remote
        if not self._networks or nearest is None:
            return nearest
        address = _address(nearest)
        if address is None or not self._are_ours(address):
            return nearest
        for said in reversed(self._chain(request.headers.getall(self._header, []))):
            before = _address(said)
            if before is None:
                break
            address = before
            if not self._are_ours(address):
                break
        return str(address)

    def is_secure(self, request: web.Request) -> bool:
        """The client speaks TLS, with us or with a proxy of ours."""
        if request.secure or not self._networks:
            return request.secure
        address = _address(request.remote or "")
        if address is None or not self._are_ours(address):
            return False
        if self._header == "x-forwarded-for":
            said = request.headers.get("x-forwarded-proto", "")
        else:
            elements = _elements(",".join(request.headers.getall(self._header, [])))
            said = _part(elements[-1], "proto") if elements else ""
        return said.rpartition(",")[2].strip().lower() == "https"

    def _are_ours(self, address: Address) -> bool:
        return any(address in network for network in self._networks)

    def _chain(self, headers: Sequence[str]) -> list[str]:
        joined = ",".join(headers)
        if self._header == "x-forwarded-for":
            return [part.strip() for part in joined.split(",")]
        return [_part(element, "for") for element in _elements(joined)]


def _elements(text: str) -> list[str]:
    """Split at the commas outside of quotes (RFC 7239, section 4); a quote that is never closed is none."""
    closed = _QUOTES.match(text)
    assert closed is not None
    text = closed[0] + text[closed.end() :].replace('"', "")
    return re.findall(r'(?:[^,"]|"(?:[^"\\]|\\.)*+")+', text)


def _part(element: str, name: str) -> str:
    """Such as the ``for`` of one element; empty where it has none."""
    for pair in re.findall(r'(?:[^;"]|"(?:[^"\\]|\\.)*+")+', element):
        found = _PAIR.fullmatch(pair)
        if found is not None and found[1].lower() == name:
            return found[2].strip('"')
    return ""


def _address(text: str) -> Address | None:
    """An address, perhaps with a port; None for what is none, such as "unknown"."""
    found = _PORT.fullmatch(text)
    if found is not None:
        text = found["six"] or found["four"] or ""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else ipaddress.IPv4Address(mapped)
