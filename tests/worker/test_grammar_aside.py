"""Rules that somebody wrote: no step waits for them, and answers are what they would be if it did."""

from __future__ import annotations

import re
import threading

import pytest
from llguidance import LLParserLimits

from policies import wire
from policies.terms import Sampling
from tests.worker.guided import EOS, Guided, guided_model
from tests.worker.peer import WorkerProcess
from worker.grammar import aside, store

SUMS = 'start: sum\nsum: term (("+" | "-") term)*\nterm: /[0-9]{1,3}/ | "(" sum ")"\n'
PAIRS = 'start: pair pair\npair: "(" pair pair ")" | "[]"\n'
"""Nothing can be added to one of these at its end."""


WHOLE = 'start: "a" | "b"\n', '["a", "b"]'
"""Whole at the last token that it may have."""


def ambiguous(num_rules: int, before: str) -> str:
    """Rules that make more of a letter than anybody can follow, behind some text."""
    names = range(num_rules)
    ways = " | ".join(f"a{name} s | s a{name}" for name in names)
    return f'start: "{before}" s\ns: {ways} | "a"\n' + "".join(f'a{name}: /[a-z ]/ | ""\n' for name in names)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return guided_model(tmp_path_factory.mktemp("guided"))


def is_sum(text: str) -> bool:
    before = ""
    while before != text:
        before, text = text, re.sub(r"\(\d+([+-]\d+)*\)", "1", text)
    return re.fullmatch(r"\d+([+-]\d+)*", text) is not None


def is_pair(text: str) -> bool:
    before = ""
    while before != text:
        before, text = text, text.replace("([][])", "[]")
    return text == "[][]"


class Blocked:
    """A thread that follows rules, with something else to do until it is let go."""

    def __init__(self, guided: Guided, is_slow: bool = False) -> None:
        self._event = threading.Event()
        guided.grammars._aside.submit(self._event.wait, is_slow=is_slow)

    def let_go(self) -> None:
        self._event.set()


def answers_of(guided: Guided) -> dict[tuple[str, int], tuple[list[int], str]]:
    return {name: (answer.token_ids, answer.reason) for name, answer in guided.answers.items()}


def ask(guided: Guided) -> None:
    for seed in range(4):
        asked = {"seed": seed, "max_tokens": 40, "temperature": seed % 2, "top_p": 1 - seed / 10}
        guided.submit(f"just{seed}", "choice" if seed % 2 else "lark", WHOLE[seed % 2], max_tokens=1 + seed // 2)
        guided.submit(f"sums{seed}", "lark", SUMS, num=2, **asked)
        guided.submit(f"pairs{seed}", "lark", PAIRS, **asked)
        guided.submit(f"plain{seed}", "", "", **asked)


@pytest.mark.parametrize("overlaps", [False, True])
def test_answers_are_of_the_language_and_the_same_however_late_their_masks_are(path, overlaps):
    """``overlaps``: steps are launched before the tokens of the one before are read, as on a device."""
    prompt = Guided(path, not overlaps, deterministic=True)
    ask(prompt)
    prompt.run()
    prompt.close()
    assert not prompt.failures
    late = Guided(path, not overlaps, deterministic=True)
    late.runner.overlaps = overlaps
    late.grammars._aside.wait = lambda future: None
    ask(late)
    num_held_up = num_steps = 0
    while late.boarding.has_waiting or late.engine.has_work:
        blocked = Blocked(late) if num_steps % 3 == 0 else None
        late.step()
        num_held_up += late.engine._scheduler.num_held_up
        num_steps += 1
        if blocked is not None:
            late.step()
            blocked.let_go()
    late.engine.audit()
    late.close()
    assert num_held_up > 50
    assert answers_of(late) == answers_of(prompt)
    is_right = {"sums": is_sum, "pairs": is_pair, "just": {"a", "b"}.__contains__, "plain": lambda text: True}
    for (name, _), answer in prompt.answers.items():
        if answer.reason == "stop":
            assert is_right[name[:-1]](answer.text), answer.text
        assert answer.reason == "stop" or not name.startswith("just")
    assert sum(answer.reason == "stop" for (name, _), answer in prompt.answers.items() if name.startswith("pairs")) > 1


def test_others_go_on_while_a_mask_is_not_there(path):
    guided = Guided(path)
    guided.submit("slow", "lark", SUMS, max_tokens=20)
    while not guided.engine.has_work:
        guided.step()
    blocked = Blocked(guided)
    guided.submit("plain", "", "", max_tokens=60, ignore_eos=True)
    while not (plain := guided.answers.get(("plain", 0))) or not plain.reason:
        guided.step()
    # What was found before the thread was blocked is drawn, and no more.
    assert len(guided.answers["slow", 0].token_ids) <= 3
    guided.step()
    assert guided.engine.rests
    assert guided.engine.cancel("slow")[0].finish.reason == "cancelled"
    guided.submit("again", "lark", SUMS, max_tokens=20)
    blocked.let_go()
    guided.run()
    assert not guided.engine.rests or not guided.engine.has_work
    assert len(guided.answers["again", 0].token_ids) > 1
    guided.close()


def test_rules_that_are_slow_and_those_that_are_new_keep_no_others_waiting(path, monkeypatch):
    guided = Guided(path)
    monkeypatch.setattr(aside, "SLOW_S", 0.0)
    guided.submit("slow", "lark", SUMS, max_tokens=5)
    guided.run()
    monkeypatch.undo()
    guided.submit("quick", "lark", PAIRS, max_tokens=20)
    guided.run()
    num_before = len(guided.answers["slow", 0].token_ids)
    blocked = Blocked(guided, is_slow=True)
    guided.submit("slow2", "lark", SUMS, max_tokens=20, min_tokens=10)
    guided.submit("new", "lark", 'start: "new"', max_tokens=20)
    guided.submit("quick2", "lark", PAIRS, max_tokens=20)
    while not (quick := guided.answers.get(("quick2", 0))) or not quick.reason:
        guided.step()
    assert quick.token_ids
    assert len(guided.answers["slow2", 0].token_ids) < num_before
    assert ("new", 0) not in guided.answers
    blocked.let_go()
    guided.run()
    assert len(guided.answers["slow2", 0].token_ids) >= 10
    assert guided.answers["new", 0].text.startswith("new")
    guided.close()


def test_rules_that_were_compiled_are_followed_where_no_more_threads_can_be_had(path):
    guided = Guided(path)
    guided.submit("a", "lark", PAIRS, max_tokens=20)
    before = threading.stack_size(1 << 46)  # more than there are addresses
    try:
        guided.run()
    finally:
        threading.stack_size(before)
    assert guided.answers["a", 0].token_ids
    guided.close()


@pytest.mark.parametrize("is_slow", [False, True])
def test_tenants_take_turns(is_slow):
    threads, goes_on, order = aside.Aside(lambda: None), threading.Event(), []
    threads.submit(goes_on.wait, b"a", is_slow)
    for number in range(3):
        threads.submit(lambda number=number: order.append(("a", number)), b"a", is_slow)
    others = [threads.submit(lambda name=name: order.append((name, 0)), name.encode(), is_slow) for name in "bc"]
    last = threads.submit(lambda: order.append(("a", 3)), b"a", is_slow)
    goes_on.set()
    for each in (*others, last):
        each.result()
    assert order[-2:] == [("a", 2), ("a", 3)]
    assert {name for name, _ in order[:4]} == {"a", "b", "c"}


def test_who_loses_its_blocks_while_it_is_late_goes_on(path):
    guided = Guided(path, deterministic=True)
    for seed in range(6):
        guided.submit(f"s{seed}", "lark", SUMS, seed=seed, max_tokens=60, min_tokens=50)
    guided.run()
    guided.close()
    scarce = Guided(path, deterministic=True, max_kv_bytes=100_000, max_model_tokens=128)
    scarce.grammars._aside.wait = lambda future: None
    for seed in range(6):
        scarce.submit(f"s{seed}", "lark", SUMS, seed=seed, max_tokens=60, min_tokens=50, priority=5 - seed)
    for seed in range(8):
        scarce.submit(f"plain{seed}", "", "", seed=seed, max_tokens=80, ignore_eos=True)
    scarce.run()
    scarce.close()
    stats = scarce.engine.stats()
    assert stats.num_preemptions + stats.num_tail_frees > 0
    assert not scarce.failures
    told = answers_of(scarce)
    assert {name: told[name] for name in told if name[0].startswith("s")} == answers_of(guided)


def test_answers_go_on_from_what_another_worker_wrote(path):
    guided = Guided(path, deterministic=True)
    guided.submit("whole", "lark", SUMS, seed=3, max_tokens=30, min_tokens=20)
    guided.run()
    whole = guided.answers["whole", 0]
    for num in (1, 5, 17):
        guided.submit(f"more{num:02}", "lark", SUMS, seed=3, max_tokens=30, emitted={0: whole.token_ids[:num]})
    guided.submit("wrong", "lark", SUMS, emitted={0: [EOS + 1, EOS + 1]})
    guided.run()
    for num in (1, 5, 17):
        assert not guided.failures.get(f"more{num:02}")
        text = guided.answers[f"more{num:02}", 0].text
        assert set(text) <= set("0123456789+-()")
        assert guided.answers[f"more{num:02}", 0].token_ids
    assert "no beginning" in guided.failures["wrong"].reason
    guided.close()


def test_a_token_that_takes_too_long_is_the_last_one_of_its_rules(path, monkeypatch):
    guided = Guided(path)
    for name in ("first", "second"):
        guided.submit(name, "lark", SUMS, max_tokens=200, min_tokens=150)
    while len(guided.answers) < 2:
        guided.step()
    monkeypatch.setattr(aside, "MAX_TOKEN_S", 0.0)
    guided.submit("plain", "", "", max_tokens=30, ignore_eos=True)
    guided.run()
    monkeypatch.undo()
    for name in ("first", "second"):
        failure = guided.failures[name]
        assert failure.code == "invalid_request"
        assert "its grammar cannot be followed any further: one token takes" in failure.reason
    assert len(guided.answers["plain", 0].token_ids) == 30
    guided.submit("third", "lark", SUMS)
    guided.submit("other", "lark", PAIRS)
    guided.run()
    assert "the grammar cannot be followed: one token takes" in guided.failures["third"].reason
    assert guided.answers["other", 0].token_ids
    guided.close()


def test_rules_whose_first_mask_takes_too_long_are_refused(path, monkeypatch):
    guided = Guided(path)
    monkeypatch.setattr(aside, "MAX_TOKEN_S", 0.0)
    guided.submit("slow", "lark", SUMS)
    guided.run()
    assert "the grammar cannot be compiled: one token takes" in guided.failures["slow"].reason
    guided.close()


def test_an_expression_with_too_many_states_is_its_requests_own_fault_and_hears_what_to_do(path, monkeypatch):
    monkeypatch.setattr(store, "LIMITS", LLParserLimits(verbose_errors=False, max_lexer_states=300))
    guided = Guided(path)
    guided.submit("r", "regex", ".*a.{40}", max_tokens=1000, min_tokens=900)
    guided.run().close()
    failure = guided.failures["r"]
    assert failure.code == "invalid_request"
    assert "too many states: 300" in failure.reason
    assert failure.reason.endswith("make such counts smaller, or what may come before them narrower")


class Panic(BaseException):
    """As one of native code comes to Python."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [(MemoryError("no room"), "MemoryError: no room"), (Panic("no such index"), "RuntimeError: no such index")],
)
def test_what_goes_wrong_on_a_thread_ends_one_request_and_no_worker(path, monkeypatch, error, reason):
    follow_now = aside.AsideGuide._follow_now

    def followed(guide: aside.AsideGuide) -> aside.Found:
        if guide._max_tokens == 17:
            raise error
        return follow_now(guide)

    monkeypatch.setattr(aside.AsideGuide, "_follow_now", followed)
    guided = Guided(path)
    guided.submit("short", "lark", SUMS, max_tokens=17, min_tokens=10)
    guided.submit("other", "lark", SUMS, max_tokens=20)
    guided.run().close()
    assert {name: (each.code, each.reason) for name, each in guided.failures.items()} == {"short": ("internal", reason)}
    assert guided.answers["other", 0].reason


def test_a_worker_serves_others_while_it_is_at_rules_that_nobody_can_follow(path):
    with WorkerProcess(path) as worker, worker.connect() as gateway:
        prompt = list(range(5, 17))
        # What may follow the z takes long to find out.
        gateway.send(wire.Submit("slow", prompt, Sampling(50), grammar=wire.Grammar("lark", ambiguous(80, "qz"))))
        while len(gateway.answers.get(("slow", 0), [])) < 2:
            assert gateway.message() is not None
        gateway.submit("plain0", prompt)
        num = 0
        while not isinstance(message := gateway.message(), wire.Failed):
            assert message is not None
            if (f"plain{num}", 0) in gateway.finishes:
                num += 1
                gateway.submit(f"plain{num}", prompt)
        assert message.request_id == "slow"
        assert "cannot be followed any further" in message.reason
        assert num > 5
