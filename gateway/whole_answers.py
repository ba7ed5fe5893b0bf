"""What a collector answers by HTTP comes whole within a request's timeout, or not at all.

To requests that timeout is for each word: a server that says a byte now and then would hold whoever asks for good.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from socket import SHUT_RDWR, socket
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool


class Adapter(HTTPAdapter):
    """Of a session that one thread uses; ``mount`` says so to it."""

    def init_poolmanager(self, *given: Any, **named: Any) -> None:
        super().init_poolmanager(*given, **named)
        self._asked: socket | None = None
        """The connection, which the answer takes from whoever made it."""
        self.poolmanager.pool_classes_by_scheme = {
            "http": self._pool_of(HTTPConnectionPool, HTTPConnection),
            "https": self._pool_of(HTTPSConnectionPool, HTTPSConnection),
        }

    def _pool_of(self, pool: Any, connection: Any) -> Any:
        adapter = self

        class Noted(connection):  # type: ignore[misc]
            def request(self, *given: Any, **named: Any) -> None:
                adapter._asked = self.sock
                super().request(*given, **named)
                adapter._asked = self.sock

        return type(pool.__name__, (pool,), {"ConnectionCls": Noted})

    def send(
        self, request: Any, stream: bool = False, timeout: Any = None, *given: Any, **named: Any
    ) -> requests.Response:
        """As that of requests, with the whole answer. Raises what it raises."""
        is_late = threading.Event()

        def hang_up() -> None:
            is_late.set()
            if self._asked is not None:
                with suppress(OSError):
                    self._asked.shutdown(SHUT_RDWR)

        patience = threading.Timer(timeout, hang_up)
        patience.daemon = True
        patience.start()
        try:
            response = super().send(request, stream, timeout, *given, **named)
            response.content  # noqa: B018 (it is kept)
        except requests.RequestException:
            if not is_late.is_set():
                raise
        finally:
            patience.cancel()
        if is_late.is_set():
            raise requests.ReadTimeout(f"no whole answer within {timeout:.3g} s")
        return response


def mount(session: requests.Session) -> None:
    for scheme in ("http://", "https://"):
        session.mount(scheme, Adapter())
