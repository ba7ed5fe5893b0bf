"""How many tokens to guess, and for whom: what is known of how often guesses are right, against what they cost.

A step that verifies B draft tokens beside R sequences gives R tokens and each draft token that survives, and it takes
longer for each of them. The draft tokens taken are those that make (R + expected survivors) / time greatest, across the
whole batch: the rule of DSpark's adaptive verification, put on costs that are measured while running (policies/costs)
and on survival that is. A batch that uses the device fully has no time to spare, and gets none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

_PRIOR_RIGHT, _PRIOR_TRIALS = 1.0, 2.0
"""Before anything is known, a guess is as good as a coin."""
_MEMORY = 200.0
"""Trials of one kind that are remembered; older ones fade."""
_OWN_MEMORY = 32.0
"""Of one request."""
_OWN_PRIOR = 1.0
"""Right ones, and wrong ones, of a request, after which it counts as much as all others together."""

_LEAST_CHANCE = 0.01
"""Of a token of a draft: what comes behind one that is less likely is not looked at."""
_KNOWN = 8.0
"""Trials."""

_KINDS = (0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 7, 7, 7, 7, 7, 7, 8)
"""Drafts of about equal strength, which are counted together, by strength up to the last."""
NUM_KINDS = _KINDS[-1] + 1

PLAIN_EVERY = 16
"""Steps with drafts that gain nothing, after which there is one without."""
_LATEST = 8
"""Steps that are remembered of what verifying takes."""
_DOUBT = 0.98
"""What is left of a cost with each step in which it is not met."""
_TRIAL = 0.5
"""Of a step, what may be lost on finding out."""
_FIRST_TOKENS = 8
"""Verified before anything is known."""
_MORE_TOKENS = 4
"""Times as many as ever before are verified at once: what so few have taught holds for no more."""
_FIRST_TRIALS = 3
"""Steps with drafts before what they took is believed: one alone may have been slow for reasons of its own."""
_SURPRISE = 4.0
"""A step so many times as long as expected teaches only as much as this."""

_ALLOWANCE = 0.005
"""Of every step, what guessing may cost even where nothing comes of it."""
_SAVINGS, _CHANCES = 1.0, 24.0
"""Steps' time that it may have in hand, at most: what it gained an hour ago is no reason to lose now. The second one,
shared by the requests of a step, where that is more: of a few requests each guess counts for much."""
_SEEN = 0.9
"""Of what is gained; not all that it costs is seen."""
_DEBT = 1 / 3
"""Of the savings, that those whose guesses come right may owe."""
_WORST = 2 / 3
"""Of the savings, that is owed at most, and that one step can be charged with if that is more than what follows: a long
text is met once, and may pay later."""
_CHARGED = 2.0
"""Steps' time that one step can be charged with at least: large batches have small savings, and catch up with much."""
_LONGEST = 8.0
"""Steps' time that one step is charged with, at most: what takes longer was mostly not its drafts, but whoever else
wanted the processor."""

_ENOUGH = 1 / 2
"""Of the savings, what there must be again once they are gone: a draft model has to catch up with a text before it
gains anything, and with less would be stopped as soon as it has."""

BEHIND_WEIGHT = 2.0
"""What a token is worth to a request that is behind the pace it was promised, to others 1."""


def kind_of(strength: int) -> int:
    """What drafts of this strength are counted as, with those about as strong: 0 to NUM_KINDS - 1."""
    return _KINDS[min(strength, len(_KINDS) - 1)]


class Chance:
    """How often something came right, the latest trials most: the mean of a Beta distribution whose counts fade."""

    __slots__ = ("_memory", "num_right", "num_trials")

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self.num_right = self.num_trials = 0.0

    def tell(self, is_right: bool) -> None:
        if self.num_trials >= self._memory:
            keep = 1.0 - 1.0 / self._memory
            self.num_right *= keep
            self.num_trials *= keep
        self.num_trials += 1.0
        self.num_right += is_right

    def fade(self, share: float = 1.0) -> None:
        """It was not tried, for what is known of it: a little of that is forgotten, lest it never be tried again."""
        keep = _DOUBT**share
        self.num_right *= keep
        self.num_trials *= keep

    def mean(self, right: float = _PRIOR_RIGHT, trials: float = _PRIOR_TRIALS) -> float:
        """With so much known beforehand."""
        return (self.num_right + right) / (self.num_trials + trials)


class Own:
    """How much likelier or less likely one request's guesses come right than those of all, whatever kinds it had of
    them: where weak ones mostly fail, that they do says little against its strong ones."""

    __slots__ = ("num_expected", "num_right", "num_trials")

    def __init__(self) -> None:
        self.num_right = self.num_expected = self.num_trials = 0.0

    def tell(self, is_right: bool, expected: float) -> None:
        """``expected``: the chance of that, of all."""
        if self.num_trials >= _OWN_MEMORY:
            self._keep(1.0 - 1.0 / _OWN_MEMORY)
        self.num_trials += 1.0
        self.num_right += is_right
        self.num_expected += expected

    def fade(self) -> None:
        """See Chance."""
        self._keep(_DOUBT)

    def odds(self) -> float:
        """Wrong ones for each right one, over what they are of all."""
        right, expected = self.num_right + _OWN_PRIOR, self.num_expected + _OWN_PRIOR
        trials = self.num_trials + 2 * _OWN_PRIOR
        return (trials - right) / right * expected / (trials - expected)

    def _keep(self, share: float) -> None:
        self.num_right *= share
        self.num_expected *= share
        self.num_trials *= share


class Survival:
    """Of one drafter's guesses: how often each token of a draft is right, once all before it are."""

    def __init__(self) -> None:
        self._kinds = [Chance(_MEMORY) for _ in range(NUM_KINDS)]

    def expected(self, strength: int, num_tokens: int, own: Own) -> list[float]:
        """The chance of each of a draft's tokens that it and all before it are right; ends where hardly any is."""
        chances = []
        survival, kind, right, odds = 1.0, -1, 0.0, own.odds()
        for place in range(strength, strength + num_tokens):
            at = _KINDS[place] if place < len(_KINDS) else _KINDS[-1]  # as ``kind_of``, without a call
            if at != kind:
                kind, right = at, self._kinds[at].mean()
                right /= right + (1.0 - right) * odds
            survival *= right
            chances.append(survival)
            if survival < _LEAST_CHANCE:
                break
        return chances

    def refuse(self, strength: int, own: Own, share: float = 1.0) -> None:
        """Nothing of such a draft was tried. ``share``: of all drafts of the step, lest a large one forget at once what
        its requests are held against."""
        self._kinds[kind_of(strength)].fade(share)
        own.fade()

    def forgive(self, own: Own) -> None:
        """Nobody was asked for a draft, for what that takes. Only what was bad is forgotten: to think less of who is
        right often would be to ask no more."""
        kind = self._kinds[0]
        if own.num_right < own.num_expected:
            own.fade()
        if kind.num_right < _PRIOR_RIGHT / _PRIOR_TRIALS * kind.num_trials:
            kind.fade()

    @property
    def is_known(self) -> bool:
        """A few drafts at least were tried."""
        return self._kinds[0].num_trials >= _KNOWN

    def tell(self, strength: int, num_tokens: int, num_right: int, own: Own) -> None:
        """Of a draft of so many tokens the first ``num_right`` were right."""
        for place in range(min(num_tokens, num_right + 1)):
            is_right, kind = place < num_right, self._kinds[kind_of(strength + place)]
            own.tell(is_right, kind.mean())
            kind.tell(is_right)


class Effort:
    """What verifying costs just now: the latest steps with drafts held against the latest ones without.

    The fitted costs know how steps grow with what is in them. What else makes these steps slower or faster than others,
    such as how their tokens are sampled, shows in the plain ones among them; so one is taken from time to time even
    where drafts pay.
    """

    def __init__(self) -> None:
        self._bias = 1.0
        """Seconds of the latest plain steps, over what the fitted costs say."""
        self._token_s = 0.0
        self._first: list[float] = []
        """What it was in the first trials."""
        self._most_tokens = 0
        """Of a step so far."""
        self._num_plain = self._num_drafted = 0
        self._num_since_plain = self._num_since_drafted = 0
        self._gain = 1.0

    def step_s(self, fitted_s: float) -> float:
        """Of a step without drafts."""
        return self._bias * fitted_s

    @property
    def token_s(self) -> float:
        """Of one more draft token; believed less and less while there is none. Nothing, as long as it is not known."""
        return self._believed_s if self._num_drafted >= _FIRST_TRIALS else 0.0

    @property
    def _believed_s(self) -> float:
        return self._token_s * _DOUBT**self._num_since_drafted

    def max_tokens(self, step_s: float) -> int:
        """To verify at once, so that a step does not take much longer should that belief be wrong."""
        is_known = self._num_drafted >= _FIRST_TRIALS
        most = max(_FIRST_TOKENS, _MORE_TOKENS * self._most_tokens) if is_known else _FIRST_TOKENS
        if not self._token_s or (is_known and self._num_since_drafted < _LATEST):
            return most
        return min(most, max(1, int(_TRIAL * step_s / self._token_s)))

    @property
    def wants_plain(self) -> bool:
        """It is time for a step without drafts: the more they gain, the seldomer."""
        return self._num_since_plain >= PLAIN_EVERY * self._gain * self._gain

    def tell(self, fitted_s: float, seconds: float, num_draft_tokens: int, num_requests: int, num_right: int) -> None:
        """Of a step that would have taken ``fitted_s`` without drafts."""
        if fitted_s <= 0.0:
            return
        if not num_draft_tokens:
            self._num_plain, self._num_since_plain = self._num_plain + 1, 0
            self._num_since_drafted += 1
            ratio = min(seconds / fitted_s, _SURPRISE * self._bias) if self._num_plain > 1 else seconds / fitted_s
            self._bias += (ratio - self._bias) / min(self._num_plain, _LATEST)
            return
        self._num_drafted, self._num_since_plain = self._num_drafted + 1, self._num_since_plain + 1
        plain_s = self._bias * fitted_s
        more_s = max(0.0, min(seconds, _SURPRISE * plain_s) - plain_s) / num_draft_tokens
        share = 1 / min(self._num_drafted, _LATEST)
        if self._num_drafted <= _FIRST_TRIALS:
            self._first.append(more_s)
            self._token_s = median(self._first)
        else:
            # What came into doubt comes back as far as this trial confirms it, and no further.
            doubted_s = min(self._token_s, max(self._believed_s, more_s))
            self._token_s = doubted_s + (more_s - doubted_s) * share
        self._num_since_drafted = 0
        self._most_tokens = max(self._most_tokens, num_draft_tokens)
        gain = (num_requests + num_right) / num_requests * plain_s / seconds if num_requests else 1.0
        self._gain = max(1.0, self._gain + (gain - self._gain) * share)


class Purse:
    """What all guessing has cost and gained lately, in steps' time: it lives on a small part of every step and on what
    it gains, so whatever it looks for, it never takes much more than that part. Best kept for batches of about one
    size, since what does not pay among many may pay for one."""

    def __init__(self, num_requests: int) -> None:
        """For batches of about so many."""
        self._most = self._level = max(_SAVINGS, _CHANCES / num_requests)
        self.is_empty = False
        """Nobody should be looked at, until there is enough again for one step that is charged with most."""

    @property
    def is_low(self) -> bool:
        """Hardly anybody should be looked at but those whose latest guess was right."""
        return self._level <= 0.0

    def pass_steps(self, num: int) -> None:
        """So many more, whatever was in them."""
        self._level = min(self._most, self._level + num * _ALLOWANCE)
        if self._level >= _ENOUGH * self._most:
            self.is_empty = False

    def tell(self, plain_s: float, more_s: float, num_right: int, num_requests: int) -> None:
        """Of a step that would have taken ``plain_s`` for a token each, and took so much longer, looking included."""
        worst = _WORST * self._most
        change = _SEEN * num_right / num_requests - min(max(worst, _CHARGED), _LONGEST, more_s / plain_s)
        self._level = min(self._most, max(-worst, self._level + change))
        if self._level <= -_DEBT * self._most:
            self.is_empty = True


def best_length(
    chances: Sequence[float],
    num_sequences: int,
    worth: float,
    step_s: float,
    token_s: float,
    draft_s: Callable[[int], float],
) -> int:
    """How many tokens a drafter that takes time should propose for each of ``num_sequences``; 0: none.

    ``chances``: of each token of such a draft that it and all before it are right. ``worth``: the tokens that are
    expected of the step without, ``step_s``: what that would take; ``draft_s``: what so many tokens each take to
    propose, beside ``token_s`` for each that is verified.
    """
    best, best_rate = 0, worth / step_s
    survivors = 0.0
    for num, chance in enumerate(chances, 1):
        survivors += chance * num_sequences
        rate = (worth + survivors) / (step_s + num * num_sequences * token_s + draft_s(num))
        if rate > best_rate:
            best, best_rate = num, rate
        elif best:
            break  # each further token is less likely, and takes as long as the one before
    return best


def allot(
    chances: Sequence[Sequence[float]],
    weights: Sequence[float],
    num_requests: int,
    step_s: float,
    token_s: float,
    max_tokens: int,
) -> list[int]:
    """How many tokens of each draft to verify.

    ``chances``: of each draft, as by ``Survival.expected``; ``weights``: what its tokens are worth. The step would take
    ``step_s`` without any, and writes a token for each of ``num_requests``; each draft token takes ``token_s`` more. At
    most ``max_tokens`` in all.
    """
    ranked = [
        (chance * weight, draft)
        for draft, (own, weight) in enumerate(zip(chances, weights, strict=True))
        for chance in own
    ]
    ranked.sort(key=lambda pair: -pair[0])
    num_tokens = [0] * len(chances)
    worth, seconds = float(num_requests), step_s
    for value, draft in ranked[:max_tokens]:
        if value * seconds <= worth * token_s:
            break
        num_tokens[draft] += 1
        worth += value
        seconds += token_s
    return num_tokens
