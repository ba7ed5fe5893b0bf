from hypothesis import given
from hypothesis import strategies as st

from policies.prefix import DIGEST_BYTES, Chain, key_of, link, root_of

TOKENS = st.lists(st.integers(0, (1 << 32) - 1), max_size=40)


def digests(token_ids, salt=b"", block_size=4):
    return [one.digest for one in Chain(block_size, salt).extend(token_ids)]


@given(TOKENS, st.lists(st.integers(0, 40)), st.binary(max_size=80))
def test_a_chain_grown_bit_by_bit_is_the_chain_made_at_once(token_ids, cuts, salt):
    chain = Chain(4, salt)
    for cut in sorted(cuts):
        chain.extend(token_ids[:cut])
    assert [one.digest for one in chain.extend(token_ids)] == digests(token_ids, salt)
    assert len(chain.links) == len(token_ids) // 4


@given(TOKENS, TOKENS)
def test_names_agree_exactly_as_far_as_the_tokens_do(left, right):
    for position, (one, other) in enumerate(zip(digests(left), digests(right), strict=False)):
        assert (one == other) == (left[: 4 * (position + 1)] == right[: 4 * (position + 1)])


@given(TOKENS.filter(lambda token_ids: len(token_ids) >= 4), st.binary(max_size=80), st.binary(max_size=80))
def test_another_salt_gives_other_names(token_ids, salt, other_salt):
    shared = set(digests(token_ids, salt)) & set(digests(token_ids, other_salt))
    assert bool(shared) == (salt == other_salt)


def test_a_fork_goes_its_own_way():
    chain = Chain(2, b"")
    chain.extend([1, 2, 3])
    fork = chain.fork()
    fork.extend([1, 2, 3, 4])
    assert len(chain.links) == 1
    assert fork.links[:1] == chain.links


def test_a_link_carries_its_tokens():
    made = link(b"", [1, 256], key_of(b""))
    assert made.token_bytes == bytes([1, 0, 0, 0, 0, 1, 0, 0])
    assert len(made.digest) == DIGEST_BYTES


def test_another_adapter_or_another_type_of_kv_gives_other_names():
    roots = [root_of(b"salt", adapter, kv_dtype) for adapter in ("", "a", "b") for kv_dtype in ("auto", "int8", "fp8")]
    assert roots[0] == b"salt"
    assert len(set(roots)) == len(roots)
