"""Which requests may be answered twice, and when two of them are the same."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import answers, prefix
from policies.answers import Asked, Kept, Told
from policies.policy import Cache
from policies.terms import Sampling
from policies.wire import Grammar, Submit, TokenLogprob

SECRET = b"s" * 32


def asked(
    prompt: list[int] | None = None,
    *,
    model: str = "demo",
    fingerprint: str = "fp",
    stops: tuple[str, ...] = (),
    is_seeded: bool = False,
    n: int = 1,
    request_id: str = "req_1",
    **sampling: Any,
) -> Asked:
    sampling = {"max_tokens": 8, "temperature": 0.0, **sampling}
    return Asked(
        model, fingerprint, [Submit(request_id, prompt or [1, 2, 3], Sampling(**sampling), n)], stops, is_seeded
    )


def same(one: Asked, other: Asked) -> bool:
    return answers.name_of(one) == answers.name_of(other)


def test_what_an_answer_must_be_changes_the_name():
    names = set()
    for grammar in (None, Grammar("choice", '["yes"]'), Grammar("choice", '["no"]'), Grammar("regex", '["no"]')):
        other = asked()
        other.submits[0] = msgspec.structs.replace(other.submits[0], grammar=grammar)
        names.add(answers.name_of(other))
    assert len(names) == 4


def test_a_request_is_itself_whatever_its_id_and_its_salt():
    other = asked(request_id="req_2")
    other.submits[0] = msgspec.structs.replace(other.submits[0], cache_salt=b"salt", priority=3, traceparent="t")
    assert same(asked(), other)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": [1, 2, 4]},
        {"prompt": [1, 2, 3, 3]},
        {"model": "other"},
        {"fingerprint": "other"},
        {"stops": ("end",)},
        {"n": 2},
        {"max_tokens": 9},
        {"temperature": 0.5},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {7: 1.0}},
        {"min_tokens": 1},
        {"stop_token_ids": (7,)},
        {"ignore_eos": True},
        {"num_logprobs": 0},
        {"num_logprobs": 1},
    ],
    ids=str,
)
def test_whatever_changes_the_tokens_changes_the_name(change):
    assert not same(asked(), asked(**change))


@pytest.mark.parametrize("change", [{"seed": 1}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}], ids=str)
def test_a_greedy_request_does_not_draw_so_how_it_would_draw_is_no_difference(change):
    assert same(asked(), asked(**change))
    assert same(asked(), asked(is_seeded=True, **change))
    warm = {"temperature": 0.7, "is_seeded": True}
    assert not same(asked(**warm), asked(**warm, **change))


def test_a_seed_that_the_gateway_drew_is_no_difference_but_a_clients_own_is():
    assert same(asked(temperature=1.0, seed=1), asked(temperature=1.0, seed=2))
    assert not same(asked(temperature=1.0, seed=1), asked(temperature=1.0, seed=1, is_seeded=True))


def test_biases_and_stop_tokens_have_no_order():
    assert same(asked(logit_bias={1: 0.5, 2: 1.5}), asked(logit_bias={2: 1.5, 1: 0.5}))
    assert same(asked(stop_token_ids=(5, 9)), asked(stop_token_ids=(9, 5, 9)))


@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=4), min_size=1, max_size=4))
def test_prompts_are_named_together_and_never_run_into_each_other(prompts):
    one = asked()._replace(submits=[Submit("r", prompt, Sampling(8)) for prompt in prompts])
    joined = asked()._replace(submits=[Submit("r", [token for prompt in prompts for token in prompt], Sampling(8))])
    assert same(one, joined) == (len(prompts) == 1)


@pytest.mark.parametrize(
    ("exact", "temperature", "is_seeded", "takes_part"),
    [
        ("off", 0.0, True, False),
        ("deterministic", 0.0, False, True),
        ("deterministic", 1.0, True, True),
        ("deterministic", 1.0, False, False),
        ("all", 1.0, False, True),
    ],
)
def test_a_policy_says_which_requests_take_part(exact, temperature, is_seeded, takes_part):
    rules = answers.rules(Cache(exact=exact), asked(temperature=temperature, is_seeded=is_seeded))
    assert rules == answers.Rules(takes_part, takes_part)


@pytest.mark.parametrize(
    ("control", "reads", "keeps"),
    [
        ("", True, True),
        ("max-age=0", True, True),
        ("no-cache", False, True),
        ("No-Cache , max-age=0", False, True),
        ("no-store", False, False),
        ("max-age=0,no-store", False, False),
        ("no-cache=x, NO-STORE", False, False),
        (",;no-store", True, True),
    ],
)
def test_a_request_may_take_part_in_less(control, reads, keeps):
    assert answers.rules(Cache(), asked(), control) == answers.Rules(reads, keeps)


def test_answers_are_a_tenants_own_unless_two_name_the_same_group():
    def scope(tenant: str, group: str = "", secret: bytes = SECRET) -> bytes:
        return answers.scope_of(secret, tenant, group)

    assert scope("a") != scope("b")
    assert scope("a", "friends") == scope("b", "friends")
    assert scope("a", "b") not in (scope("a"), scope("b"))
    assert scope("a") != scope("a", secret=b"another secret")


def test_so_are_prefixes_and_their_salts_cannot_be_guessed():
    def salt(tenant: str, group: str = "", secret: bytes = SECRET) -> bytes:
        return prefix.salt_of(secret, tenant, group)

    assert salt("a") != salt("b")
    assert salt("a", "friends") == salt("b", "friends")
    assert salt("a", "b") not in (salt("a"), salt("b"))
    assert salt("a") != salt("a", secret=b"another secret")
    assert salt("a") != answers.scope_of(SECRET, "a", ""), "knowing one of them says nothing about the other"
    assert len({salt("a"), *[prefix.narrowed(salt(tenant), own) for tenant in "ab" for own in "xy"]}) == 5


def test_what_a_client_keeps_apart_has_names_of_its_own():
    salted = [asked()._replace(cache_salt=salt) for salt in (None, "a", "b")]
    assert len({answers.name_of(each) for each in salted}) == 3


def test_what_is_kept_can_be_read_again_and_what_cannot_be_read_is_nothing():
    kept = Kept(12, [Told(0, 1, [1, 2], [TokenLogprob(-0.5, [1], [-0.5])] * 2, "stop"), Told(1, 0, [], None, "length")])
    value = answers.packed(kept)
    assert answers.unpacked(value) == kept
    for damaged in (b"", value[:-1], value[1:], msgspec.msgpack.encode(["1", 12, []])):
        assert answers.unpacked(damaged) is None
