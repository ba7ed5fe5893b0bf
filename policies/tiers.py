"""OpenAI's ``service_tier`` and our classes: which class serves a request that asks for a tier."""

from __future__ import annotations

from collections.abc import Mapping

from policies.policy import Policy
from policies.settings import SlaClass

AUTO = "auto"
"""The tier of a request that asks for none."""


def class_for(policy: Policy, classes: Mapping[str, SlaClass], service_tier: str) -> str:
    """The class that has the tier; where the policy does not allow it the nearest less important one that it does, else
    the policy's own. ``auto`` and a tier that no class has mean the policy's own."""
    asked = next((name for name, terms in classes.items() if terms.service_tier == service_tier), None)
    if service_tier == AUTO or asked is None or asked == policy.sla_class:
        return policy.sla_class
    least = classes[asked].priority
    allowed = [name for name in classes if name in policy.sla_classes and classes[name].priority >= least]
    if asked in allowed:
        return asked
    return min(allowed, key=lambda name: classes[name].priority, default=policy.sla_class)
