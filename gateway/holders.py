"""Who there is, as the directory knows them: keys, tenants, and the policies that they go by."""

from __future__ import annotations

import msgspec

from gateway.restrictions import Restriction
from policies.policy import Policy


class Key(msgspec.Struct, frozen=True, gc=False):
    """A key that is not revoked."""

    id: str
    tenant_id: str | None
    """None: a key of the administration."""
    role: str | None
    """Of an administrator."""
    name: str
    """Empty for a key of a tenant, of which there may be a million."""
    expires_at: int | None
    restriction: Restriction | None


class Tenant(msgspec.Struct, frozen=True, gc=False):
    """A tenant, disabled or not."""

    id: str
    organization_id: str
    name: str
    policy_name: str
    is_disabled: bool


class Version(msgspec.Struct, frozen=True, gc=False):
    """The version of a policy that counts."""

    name: str
    version: int
    policy: Policy
