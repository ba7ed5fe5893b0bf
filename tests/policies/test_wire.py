import struct
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import framing, wire
from policies.terms import Sampling

texts = st.text(max_size=8)
counts = st.integers(0, 2**31)
seconds = st.floats(0, 1e6)
sampling = st.builds(
    Sampling,
    max_tokens=counts,
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.dictionaries(counts, st.floats(-100, 100)),
)
promises = st.none() | st.floats(-1e6, 1e6)
submits = st.builds(
    wire.Submit,
    texts,
    st.lists(counts, max_size=40),
    sampling,
    cache_salt=st.binary(max_size=16),
    ttft_s=promises,
    tpot_s=promises,
    tenant=st.binary(max_size=8),
    weight=st.floats(0.001, 1000),
    emitted_token_ids=st.dictionaries(counts, st.lists(counts, max_size=4), max_size=3),
    grammar=st.none() | st.builds(wire.Grammar, st.sampled_from(["json_schema", "regex", "choice"]), texts),
    predicted_token_ids=st.lists(counts, max_size=4),
    cut_indices=st.lists(counts, max_size=3),
)
to_worker = st.one_of(
    st.builds(wire.Hello, counts, texts), submits, st.builds(wire.Cancel, texts), st.just(wire.Drain())
)
logprobs = st.lists(
    st.builds(wire.TokenLogprob, st.floats(-100, 0), st.lists(counts), st.lists(st.floats(-100, 0))), max_size=2
)
finishes = st.builds(
    wire.Finish, st.sampled_from(["stop", "length", "cancelled"]), counts, counts, seconds, seconds, seconds
)
deltas = st.builds(wire.Delta, texts, counts, st.lists(counts, max_size=4), st.none() | logprobs, st.none() | finishes)
to_gateway = st.one_of(
    st.builds(wire.StepOutput, st.lists(deltas, max_size=5)),
    st.builds(wire.Failed, texts, texts, texts),
    st.builds(wire.Hello, counts, texts),
)


@given(st.lists(to_worker, max_size=6), st.lists(st.integers(1, 50), min_size=1))
def test_frames_arrive_whole_however_they_are_cut(messages, cuts):
    check_round_trip(framing.frames_to_worker(), messages, cuts)


@given(st.lists(to_gateway, max_size=6), st.lists(st.integers(1, 50), min_size=1))
def test_answers_arrive_whole_however_they_are_cut(messages, cuts):
    check_round_trip(framing.frames_to_gateway(), messages, cuts)


def check_round_trip(frames, messages, cuts):
    data = b"".join(map(framing.encode, messages))
    received, start, turn = [], 0, 0
    while start < len(data):
        size = cuts[turn % len(cuts)]
        received += frames.feed(data[start : start + size])
        start, turn = start + size, turn + 1
    assert received == messages


@given(st.binary(max_size=200))
def test_garbage_is_a_named_error_or_an_unfinished_frame(data):
    with suppress(wire.WireError):
        for message in framing.frames_to_gateway().feed(data):
            assert isinstance(message, wire.Message)


def test_a_frame_over_the_bound_is_refused_before_its_bytes_are_held():
    with pytest.raises(wire.WireError, match="exceeds"):
        list(framing.frames_to_worker().feed(struct.pack(">I", framing.MAX_FRAME_BYTES + 1)))
    with pytest.raises(wire.WireError, match="exceeds"):
        framing.encode(wire.Hello(1, "x" * framing.MAX_FRAME_BYTES))


@pytest.mark.parametrize(
    "body", [b"", b"\xc0", msgspec.msgpack.encode(["Nobody", 1]), msgspec.msgpack.encode(["Submit", 1, 2])]
)
def test_a_wrong_message_is_a_named_error(body):
    with pytest.raises(wire.WireError, match="bad frame"):
        list(framing.frames_to_worker().feed(struct.pack(">I", len(body)) + body))


def test_messages_before_a_bad_frame_are_delivered():
    frames = framing.frames_to_worker()
    received = frames.feed(framing.encode(wire.Drain()) + struct.pack(">I", 1) + b"\xc0")
    assert next(received) == wire.Drain()
    with pytest.raises(wire.WireError):
        next(received)
