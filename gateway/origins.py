"""Pages of other origins: which may read answers from a browser (the Fetch standard's CORS protocol).

Keys come in headers that a page sets itself and never in cookies, so no credentials are allowed and "*" may stand for
every origin.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import hdrs, web

ALLOWED_HEADERS = "*, authorization"
"""An asterisk stands for every header but that one."""
METHODS = "GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS"
MAX_AGE_S = 600
"""So long a browser need not ask again."""


class Origins:
    """Those whose pages may."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = {origin.lower().rstrip("/"): origin for origin in origins}

    def headers(self, request: web.Request) -> dict[str, str]:
        """For the answer to ``request``; none where nobody may. A cache must not give a page what is written for
        whoever is none."""
        if not self._origins:
            return {}
        asking = request.headers.get(hdrs.ORIGIN)
        if asking is None:
            return {"vary": "Origin"}
        origin = "*" if "*" in self._origins else self._origins.get(asking.lower())
        if origin is None:
            return {"vary": "Origin"}
        return {"access-control-allow-origin": origin, "vary": "Origin", **EXPOSED}

    def preflight(self, request: web.Request) -> dict[str, str] | None:
        """What a browser is told that asks before it sends; None where the request is no such question, or is refused
        by not being answered as one."""
        headers = request.headers
        if request.method != hdrs.METH_OPTIONS or hdrs.ACCESS_CONTROL_REQUEST_METHOD not in headers:
            return None
        if hdrs.ACCESS_CONTROL_ALLOW_ORIGIN.lower() not in self.headers(request):
            return None
        return {
            "access-control-allow-methods": METHODS,
            "access-control-allow-headers": ALLOWED_HEADERS,
            "access-control-max-age": str(MAX_AGE_S),
        }


EXPOSED = {"access-control-expose-headers": "*"}
