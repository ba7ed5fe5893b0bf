"""A service tier asked for, and the class that serves it."""

from __future__ import annotations

import pytest

from policies.policy import Policy
from policies.settings import CLASSES
from policies.tiers import class_for


@pytest.mark.parametrize(
    ("tier", "served"),
    [("auto", "standard"), ("priority", "interactive"), ("default", "standard"), ("flex", "batch"), ("", "standard")],
)
def test_a_policy_that_allows_all_classes_gives_what_is_asked_for(tier, served):
    assert class_for(Policy(), CLASSES, tier) == served


def test_a_tier_that_the_policy_does_not_allow_is_served_by_the_next_less_important_one():
    policy = Policy(sla_class="batch", sla_classes=("batch", "standard"))
    assert class_for(policy, CLASSES, "priority") == "standard"
    assert class_for(policy, CLASSES, "flex") == "batch"


def test_where_nothing_less_important_is_allowed_the_policy_decides():
    policy = Policy(sla_class="interactive", sla_classes=("interactive",))
    assert class_for(policy, CLASSES, "flex") == "interactive"


def test_the_policys_own_class_is_always_allowed():
    assert class_for(Policy(sla_class="interactive", sla_classes=()), CLASSES, "priority") == "interactive"
