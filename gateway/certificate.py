"""The certificate of the listening sockets: read at start, and again when its files have changed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import AsyncIterator

from gateway.background import alongside
from gateway.clock import Clock
from gateway.doors import DoorsError
from policies.settings import Server

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""How often the files are looked at."""

BAD_DATES = (9, 10)
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""

State = tuple[tuple[int, int, int], ...]


class Certificate:
    """A certificate and its key. Connections that are open stay with the one that they began with."""

    def __init__(self, config: Server) -> None:
        """Raises DoorsError."""
        self._cert, self._key = config.tls_cert, config.tls_key
        try:
            self._state = self._looked()
            self.context = self._loaded()
        except (OSError, ssl.SSLError, ValueError) as error:
            raise DoorsError(
                f"server.tls_cert {self._cert} with server.tls_key {self._key} cannot be used: {_said(error)}"
            ) from None

    @contextlib.asynccontextmanager
    async def watched(self, clock: Clock) -> AsyncIterator[None]:
        """While it is used."""
        self._warn()
        async with alongside(self._watch(clock)):
            yield

    def renew(self) -> bool:
        """Reads the files if they have changed. Whether they had, and could be used; if they cannot, the old
        certificate stays."""
        try:
            state = self._looked()
            if state == self._state:
                return False
            self._loaded()  # first beside the one in use: half of a change is no pair
            self.context.load_cert_chain(self._cert, self._key, password=_nobody)
        except (OSError, ssl.SSLError, ValueError) as error:
            log.warning("the certificate %s has changed and cannot be used: %s", self._cert, _said(error))
            return False
        self._state = state
        log.info("the certificate %s was read again", self._cert)
        self._warn()
        return True

    @property
    def trouble(self) -> str:
        """What is wrong with its dates, by this machine's clock, as a client of that would find; empty: nothing."""
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        asks = client.wrap_bio(to_client, to_server)
        answers = self.context.wrap_bio(to_server, to_client, server_side=True)
        try:
            client.load_verify_locations(self._cert)
            for side in (asks, answers, asks):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        except ssl.SSLCertVerificationError as error:
            return error.verify_message if error.verify_code in BAD_DATES else ""
        except OSError:  # SSLError among them: it is for other clients, or is being replaced
            pass
        return ""

    def _warn(self) -> None:
        if trouble := self.trouble:
            log.warning("the certificate %s: %s; clients will refuse it until it is renewed", self._cert, trouble)

    async def _watch(self, clock: Clock) -> None:
        while True:
            await clock.sleep(LOOK_S)
            await asyncio.to_thread(self.renew)

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self._cert, self._key, password=_nobody)
        return context

    def _looked(self) -> State:
        found = (os.stat(self._cert), os.stat(self._key))
        return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in found)


def _nobody() -> str:
    """OpenSSL would ask for a password on the terminal."""
    raise ValueError("the key has a password, and there is nobody to ask for it")


def _said(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
