"""Places for so many at once: of all tenants, and fewer of each, so that nobody takes those of all others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gateway import errors


class Places:
    """Nobody waits for one: whoever finds none is told when to come back."""

    def __init__(self, most: int, most_of_one: int, full: str, has_all: str, retry_after_s: float) -> None:
        """``most_of_one`` tenant's. ``full``: what is said where all are taken; ``has_all``: where the tenant has its
        share, with ``{}`` in the place of how many that are."""
        self._most = most
        self._most_of_one = most_of_one
        self._full = full
        self._has_all = has_all
        self._retry_after_s = retry_after_s
        self._tenants: list[str] = []
        """One for each that is taken."""

    @property
    def num_taken(self) -> int:
        return len(self._tenants)

    @contextlib.contextmanager
    def one(self, tenant_id: str) -> Iterator[None]:
        """One of them. Raises ServiceUnavailable, and RequestsLimited when the tenant has its share."""
        if self.num_taken >= self._most:
            raise errors.ServiceUnavailable(self._full, retry_after_s=self._retry_after_s)
        if (mine := self._tenants.count(tenant_id)) >= self._most_of_one:
            raise errors.RequestsLimited(self._has_all.format(mine), headers={}, retry_after_s=self._retry_after_s)
        self._tenants.append(tenant_id)
        try:
            yield
        finally:
            self._tenants.remove(tenant_id)
