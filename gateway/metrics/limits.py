"""How much of its limits each tenant has used, read from what the limits keep in this gateway's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import islice

from gateway.house import Gateway
from gateway.metrics.counts import Names, Sample


def samples(gw: Gateway, names: Names, most: int) -> Iterator[Sample]:
    """Of those tenants that have series of their own, and, while there is room for more of these, of the first ``most``
    that there are: after a start one may have used all of a day without a row since."""
    directory, known = gw.directory, set(names)
    found = {tenant.id: tenant for tenant in islice(directory.tenants(), most)}
    for tenant_id in known - found.keys():
        with contextlib.suppress(KeyError):  # it was deleted
            found[tenant_id] = directory.tenant(tenant_id)
    for tenant_id, tenant in found.items():
        version = directory.policy(tenant.policy_name)
        if version is None:
            continue
        readings = gw.limits.known(version.policy, tenant_id)
        if tenant_id not in known and (
            not any(reading.used for reading in readings) or names.known(tenant_id) != tenant_id
        ):
            continue
        for reading in readings:
            # A ceiling of nothing is always used up.
            ratio = reading.used / reading.ceiling if reading.ceiling else 1.0
            yield Sample("penstock_limit_used_ratio", (tenant_id, reading.limit), ratio)
