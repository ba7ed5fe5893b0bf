"""The loop on the real wire, before a scripted device: what gateways may do to a worker, and to each other."""

import contextlib
import struct
import threading
import time

import pytest

from policies import framing, wire
from policies.prefix import digests_of
from policies.settings import Engine as EngineSettings
from tests.worker.peer import PATIENCE_S, Peer, running
from tests.worker.scripted import ScriptedRunner, ScriptedSampler, answer
from worker.channel import MAX_OUTGOING_BYTES, listen
from worker.engine import Engine
from worker.loop import GREETING_TIMEOUT_S, HEARTBEAT_S, Loop

PROMPT = list(range(1, 11))


class House:
    """A loop with its engine; the clock can be moved on, and steps can be held back."""

    def __init__(self, address, **settings):
        self.address = address
        self.runner = ScriptedRunner(num_blocks=256, block_size=4)
        self.may_step = threading.Event()
        self.may_step.set()
        self.in_step = threading.Event()
        self.runner.fault = self.step_when_it_may
        self.skipped_s = 0.0
        self.engine = Engine(self.runner, ScriptedSampler(), EngineSettings(**settings), self.now)
        self.listener = listen(address)
        if address.startswith("tcp:"):
            self.address = f"tcp:127.0.0.1:{self.listener.getsockname()[1]}"
        ready = wire.Ready("tiny", 1024, 50, [0], 4, 256, 8, "cpu", "float32", 1)
        self.loop = Loop(self.engine, self.listener, wire.Hello(wire.VERSION, "tiny-0"), ready, self.now)

    def step_when_it_may(self, spans):
        self.in_step.set()
        self.may_step.wait(PATIENCE_S)

    def now(self):
        return time.monotonic() + self.skipped_s

    def connect(self, **options):
        return Peer(self.address, **options)


@pytest.fixture
def heartbeat_s():
    """More often than in service: most of these tests end with the next one."""
    return 0.1


@pytest.fixture
def house(tmp_path, monkeypatch, heartbeat_s):
    monkeypatch.setattr("worker.loop.HEARTBEAT_S", heartbeat_s)
    house = House(f"unix:{tmp_path}/worker")
    with running(house.loop) as house.thread, contextlib.closing(house.listener):
        yield house
        house.may_step.set()


def expected(max_tokens, seed=0):
    return answer(PROMPT, seed, max_tokens, eos_token_ids=())


def test_a_gateway_is_greeted_and_its_request_answered(house):
    with house.connect() as gateway:
        assert gateway.hello == wire.Hello(wire.VERSION, "tiny-0")
        assert gateway.ready.max_model_tokens == 1024
        gateway.submit("a", PROMPT)
        assert gateway.finish("a") == expected(8)
        assert gateway.quiet().num_decode_tokens == 7


def test_tcp_works_as_unix_sockets_do():
    house = House("tcp:127.0.0.1:0")
    with running(house.loop), contextlib.closing(house.listener), house.connect() as gateway:
        gateway.submit("a", PROMPT)
        assert gateway.finish("a") == expected(8)


def test_all_sequences_that_moved_in_a_step_travel_in_one_frame(house):
    with house.connect() as gateway:
        house.may_step.clear()
        for name in "abc":
            gateway.submit(name, PROMPT, num_sequences=2)
        house.may_step.set()
        for name in "abc":
            gateway.finish(name)
        sizes = [len(house.runner.steps), gateway.quiet().num_steps]
        assert sizes[0] == sizes[1]


def test_two_gateways_are_answered_each_on_its_own_channel(house):
    with house.connect() as one, house.connect() as other:
        one.submit("a", PROMPT, seed=1)
        other.submit("b", PROMPT, seed=2)
        assert one.finish("a") == expected(8, 1)
        assert other.finish("b") == expected(8, 2)
        assert set(one.answers) == {("a", 0)}
        assert set(other.answers) == {("b", 0)}


def test_those_who_send_requests_are_counted_and_those_who_only_look_are_not(house):
    with house.connect() as one, house.connect(greet=False) as keeper:
        keeper.send(wire.Hello(wire.VERSION, "gateway", asks=False))
        keeper.next(wire.Stats)
        with house.connect():
            one.next(wire.Stats, num_gateways=2)
        one.next(wire.Stats, num_gateways=1)


def test_a_gateway_cannot_cancel_or_take_over_the_request_of_another(house):
    with house.connect() as one, house.connect() as other:
        house.may_step.clear()
        one.submit("a", PROMPT)
        other.send(wire.Cancel("a"))
        house.may_step.set()
        assert one.finish("a") == expected(8)
        house.may_step.clear()
        house.in_step.clear()
        one.submit("b", PROMPT, 40)
        assert house.in_step.wait(PATIENCE_S)
        other.submit("b", PROMPT)
        house.may_step.set()
        refusal = other.next(wire.Failed)
        assert refusal.code == "overloaded"
        assert one.finish("b") == expected(40)


def test_a_gateway_that_is_back_before_its_old_connection_ends_may_send_a_request_again(house):
    with house.connect() as before, house.connect() as back:
        house.may_step.clear()
        before.submit("a", PROMPT, 900)
        assert house.in_step.wait(PATIENCE_S)
        back.submit("a", PROMPT, 40)
        house.may_step.set()
        assert back.next(wire.Failed) == wire.Failed("a", "overloaded", "it is being answered on another connection")
        back.next(wire.Stats, num_gateways=2)
        before.socket.close()
        back.next(wire.Stats, num_gateways=1)
        back.submit("a", PROMPT, 40)
        assert back.finish("a") == expected(40)


def test_cancel_frees_the_blocks_and_answers_with_the_end(house):
    with house.connect() as gateway:
        house.may_step.clear()
        gateway.submit("a", PROMPT, 900, num_sequences=2)
        assert house.in_step.wait(PATIENCE_S)
        gateway.send(wire.Cancel("a", 0), wire.Cancel("never"))
        house.may_step.set()
        gateway.finish("a", 0)
        assert gateway.finishes["a", 0].reason == "cancelled"
        gateway.send(wire.Cancel("a"))
        gateway.finish("a", 1)
        gateway.quiet()


def test_a_gateway_that_leaves_takes_its_requests_with_it(house):
    with house.connect() as stays, house.connect() as leaves:
        leaves.submit("a", PROMPT, 900)
        leaves.next(wire.StepOutput)
        leaves.socket.close()
        stays.quiet()
        stays.submit("b", PROMPT)
        assert stays.finish("b") == expected(8)


def test_what_cannot_be_taken_is_refused_on_the_wire(house):
    with house.connect() as gateway:
        gateway.submit("a", PROMPT, 2000)
        assert gateway.next(wire.Failed) == wire.Failed(
            "a", "context_length_exceeded", "10 prompt tokens and 2000 to generate exceed 1024"
        )


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n",
        struct.pack(">I", 1 << 31),
        struct.pack(">I", 3) + b"\xc1\xc1\xc1",
        framing.encode(wire.Hello(wire.VERSION + 1, "a gateway of tomorrow")),
        framing.encode(wire.Drain()),
        framing.encode(wire.Hello(wire.VERSION, "twice")) * 2,
        framing.encode(wire.Hello(wire.VERSION, "a worker")) + framing.encode(wire.Failed("a", "b", "c")),
    ],
    ids=["http", "length", "no MessagePack", "version", "before Hello", "a second Hello", "the wrong way"],
)
def test_garbage_closes_its_channel_and_disturbs_nobody_else(house, garbage, caplog):
    with house.connect() as decent, house.connect(greet=False) as peer, caplog.at_level("INFO", "penstock.worker"):
        decent.submit("a", PROMPT)
        peer.socket.sendall(garbage)
        assert peer.is_closed_by_worker()
        assert decent.finish("a") == expected(8)
        decent.quiet()
    assert "channel 2: broke the protocol: " in caplog.text


def test_a_frame_may_arrive_byte_by_byte(house):
    with house.connect() as gateway:
        for byte in framing.encode(wire.Submit("a", PROMPT, wire.Sampling(max_tokens=3, ignore_eos=True))):
            gateway.socket.sendall(bytes([byte]))
        assert gateway.finish("a") == expected(3)


def test_whoever_says_nothing_is_cut_off(house):
    with house.connect() as decent, house.connect(greet=False) as silent:
        decent.submit("before", PROMPT)
        assert decent.finish("before") == expected(8)  # its Hello has been read
        silent.next(wire.Ready)  # and this one was let in
        house.skipped_s = GREETING_TIMEOUT_S + 1
        assert silent.is_closed_by_worker()
        decent.submit("a", PROMPT)
        assert decent.finish("a") == expected(8)


def test_a_gateway_that_does_not_read_is_cut_off_and_slows_nobody(house):
    with house.connect() as decent, house.connect() as deaf:
        long_id = "x" * (1 << 20)
        with contextlib.suppress(ConnectionError):
            for number in range(MAX_OUTGOING_BYTES // len(long_id) + 8):
                deaf.submit(f"{number}{long_id}", PROMPT, 2000)  # each is refused by name
        decent.submit("a", PROMPT)
        assert decent.finish("a") == expected(8)
        with contextlib.suppress(ConnectionError):
            assert deaf.is_closed_by_worker()
        decent.quiet()


def test_a_slow_gateway_gets_everything_in_the_end(house):
    with house.connect() as gateway:
        long_id = "x" * (1 << 20)
        for number in range(20):
            gateway.submit(f"{number}{long_id}", PROMPT, 2000)
        for number in range(20):
            assert gateway.next(wire.Failed).request_id == f"{number}{long_id}"


@pytest.mark.parametrize("heartbeat_s", [HEARTBEAT_S])
def test_a_worker_says_once_a_second_that_it_is_alive(house, heartbeat_s):
    with house.connect() as gateway:
        gateway.next(wire.Stats)
        started_at = time.monotonic()
        gateway.next(wire.Stats)
        assert time.monotonic() - started_at < 20 * heartbeat_s


def test_a_worker_tells_which_blocks_it_keeps_and_tells_a_newcomer_of_all_of_them(house):
    salt = b"a tenant"
    digests = digests_of(PROMPT, 4, salt, 100)
    with house.connect() as gateway:
        gateway.next(wire.Stats)
        gateway.submit("a", PROMPT, cache_salt=salt)
        assert gateway.finish("a") == expected(8)
        assert set(gateway.next(wire.KvEvents).stored) >= set(digests)
        with house.connect() as newcomer:
            assert set(newcomer.next(wire.KvEvents).stored) >= set(digests)
        for number in range(100):
            gateway.submit(f"b{number}", [number % 40 + 1, number // 40 + 1] * 5)
        evicted = set()
        while not evicted >= set(digests):
            evicted |= set(gateway.next(wire.KvEvents).evicted)


@pytest.mark.parametrize("heartbeat_s", [HEARTBEAT_S])
def test_an_idle_worker_takes_no_cpu(house, heartbeat_s):
    with house.connect() as gateway:
        gateway.next(wire.Stats)
        clock = time.pthread_getcpuclockid(house.thread.ident)
        before = time.clock_gettime(clock)
        gateway.next(wire.Stats)
        assert time.clock_gettime(clock) - before < 0.2


def test_draining_refuses_what_is_new_finishes_what_runs_and_ends(house):
    with house.connect() as gateway:
        house.may_step.clear()
        gateway.submit("a", PROMPT, 100)
        gateway.send(wire.Drain())
        gateway.submit("b", PROMPT)
        house.may_step.set()
        assert gateway.next(wire.Failed).code == "draining"
        assert gateway.finish("a") == expected(100)
        assert gateway.is_closed_by_worker()
    house.thread.join(PATIENCE_S)
    assert not house.thread.is_alive()


def test_a_fault_of_a_step_reaches_the_gateway_and_the_loop_goes_on(house):
    def out_of_memory(spans):
        raise RuntimeError("the device has none left")

    with house.connect() as gateway:
        house.runner.fault = out_of_memory
        gateway.submit("a", PROMPT)
        failed = gateway.next(wire.Failed)
        assert (failed.request_id, failed.code) == ("a", "internal")
        assert failed.reason == "RuntimeError: the device has none left"
        assert failed.engine_s > 0
        house.runner.fault = None
        gateway.submit("b", PROMPT)
        assert gateway.finish("b") == expected(8)


def test_a_leftover_socket_file_is_replaced_and_a_plain_file_is_not(tmp_path):
    listen(f"unix:{tmp_path}/worker").close()
    listen(f"unix:{tmp_path}/worker").close()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="in use"):
        listen(f"unix:{tmp_path}/file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "address",
    ["unix:", "tcp:localhost", "http://localhost:80", "tcp:localhost:http", "tcp:localhost:65536", "worker"],
)
def test_an_address_of_another_form_is_refused(address):
    with pytest.raises(ValueError, match="an address is"):
        listen(address)
