"""The page of families is true: each is served as it says, or refused."""

from __future__ import annotations

import pytest

from benchmarks.families import SERVED, families, outcome_of, read_page

SAID = read_page()


def test_the_page_knows_every_family():
    assert SAID.keys() == families().keys(), "python -m benchmarks.families writes it anew"
    agreeing = [outcome for outcome in SAID.values() if outcome.way in SERVED and not outcome.detail]
    assert len(agreeing) >= 120


@pytest.mark.parametrize("model_type", [name for name, outcome in SAID.items() if outcome.way in SERVED])
def test_a_family_that_is_served_says_what_generate_says(model_type):
    assert outcome_of(model_type) == SAID[model_type]


@pytest.mark.parametrize("model_type", [name for name, outcome in SAID.items() if outcome.way == "refused"])
def test_a_family_that_cannot_be_served_is_refused_by_name(model_type):
    outcome = outcome_of(model_type)
    assert outcome.way == "refused"
    assert families()[model_type] in outcome.detail
