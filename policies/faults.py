"""What is wrong with a policy, a key's narrowing of one, or a price, that its types cannot say."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from policies import pricing
from policies.policy import ANY, Narrowing, Policy, widened
from policies.pricelist import Proposed

MAX_NAMES = 1000
"""Models that one document names in one place."""
MAX_NAME_CHARS = 256

Fault = tuple[str, str]
"""The path of a field, and what is wrong with it."""


def of_policy(policy: Policy, classes: Collection[str]) -> list[Fault]:
    """What keeps this policy from being used where there are these classes; empty: nothing."""
    faults = [
        (path, f"there is no class {name}; there are {', '.join(sorted(classes))}")
        for path, name in (("sla_class", policy.sla_class), *_numbered("sla_classes", policy.sla_classes))
        if name not in classes
    ]
    faults += pricing.check(policy).items()
    for path, names in (
        ("models", policy.models),
        ("model_limits", policy.model_limits),
        ("prices", policy.prices),
    ):
        faults += _of_names(path, names)
    if len(policy.sla_classes) > MAX_NAMES:
        faults.append(("sla_classes", f"names more than {MAX_NAMES}"))
    faults += [
        (f"cache.{name}", "has characters that cannot be printed")
        for name in ("sharing_group", "prefix_group")
        if not getattr(policy.cache, name).isprintable()
    ]
    return faults


def of_proposed(proposed: Proposed, classes: Collection[str], currency: str) -> list[Fault]:
    """What keeps it from going on the price list; empty: nothing."""
    found: list[Fault] = []
    if proposed.sla_class not in (ANY, *classes):
        known = ", ".join((ANY, *sorted(classes)))
        found.append(("sla_class", f"there is no class {proposed.sla_class}; there are {known}"))
    if proposed.currency not in (None, currency):
        found.append(("currency", f"all prices are in {currency}, as [billing] of the settings says"))
    if proposed.price is not None:
        found += ((f"price.{name}", what) for name, what in pricing.check_price(proposed.price).items())
    return found


def of_narrowing(narrowing: Narrowing, policy: Policy) -> list[Fault]:
    """What keeps it from being a key's of a tenant with this policy; empty: nothing."""
    faults = [
        (path, "is more than the tenant's policy gives, and a key can only take away")
        for path in widened(policy, narrowing)
    ]
    faults += pricing.check_budget(narrowing.budget).items()
    faults += _of_names("models", narrowing.models or ())
    if len(narrowing.sla_classes or ()) > MAX_NAMES:
        faults.append(("sla_classes", f"names more than {MAX_NAMES}"))
    return faults


def _numbered(path: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    return ((f"{path}[{number}]", name) for number, name in enumerate(names))


def _of_names(path: str, names: Collection[str]) -> Iterator[Fault]:
    if len(names) > MAX_NAMES:
        yield path, f"names more than {MAX_NAMES} models"
    elif any(not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable() for name in names):
        yield path, f"a model's name has 1 to {MAX_NAME_CHARS} characters that can be printed"
