"""The upstreams of one model, and which of them is asked: those of the smallest priority that can take one more, else
those of the models that stand in for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from gateway import errors
from gateway.upstreams.asking import Asked
from gateway.upstreams.failures import UpstreamUnavailable
from gateway.upstreams.server import Server
from policies.upstreams.choice import choose
from policies.upstreams.terms import Kind


class Servers:
    """All that answer for the model."""

    def __init__(self, model: str, of: Callable[[str], Servers | None]) -> None:
        """``of`` finds those of another model."""
        self.model = model
        self.servers: list[Server] = []
        self._of = of

    @property
    def is_overflow(self) -> bool:
        """The model is served here, too."""
        return all(server.known.terms.overflow for server in self.servers)

    @property
    def max_model_tokens(self) -> int:
        """0: nobody has said."""
        return max((server.known.terms.max_model_tokens for server in self.servers), default=0)

    def serves(self, kind: Kind) -> bool:
        return any(kind in server.known.terms.kinds for server in self.servers)

    def is_up(self, kind: Kind | None = None) -> bool:
        """One of them, or of those that stand in for them, may be asked."""
        return any(server.admits for server in self._every(kind))

    @property
    def is_well(self) -> bool:
        """One of them, or of those that stand in for them, is."""
        return any(server.is_well for server in self._every(None))

    def local(self, serves: Callable[[str], bool]) -> str | None:
        """The model by which workers here may answer for this one; ``serves``: they know it."""
        if self.is_overflow:
            return self.model
        return next(filter(serves, self._fallbacks(self.servers)), None)

    @property
    def first_word_s(self) -> float | None:
        """Until that of a stream, from the one that is soonest with it; None: nobody knows."""
        return min((each for server in self.servers if (each := server.first_word_s) is not None), default=None)

    def _every(self, kind: Kind | None) -> Iterable[Server]:
        """Of its own, and of the models that stand in for it."""
        own = [server for server in self.servers if kind is None or kind in server.known.terms.kinds]
        yield from own
        for other in self._stand_ins(own):
            yield from (server for server in other.servers if kind is None or kind in server.known.terms.kinds)

    def _stand_ins(self, own: Sequence[Server]) -> list[Servers]:
        found = [self._of(name) for name in self._fallbacks(own)]
        return [others for others in found if others is not None]

    def num_free(self, kind: Kind) -> int:
        """Requests that could be sent now."""
        own = [server for server in self.servers if kind in server.known.terms.kinds and server.admits]
        able = own or [server for server in self._every(kind) if server.admits]
        return sum(server.num_free for server in able)

    def _fallbacks(self, own: Sequence[Server]) -> list[str]:
        return list(dict.fromkeys(name for server in own for name in server.known.terms.fallbacks))

    def pick(self, asked: Asked, without: Sequence[Server] = ()) -> Server | None:
        """One that may be asked now and has room, not one of those."""
        own = [server for server in self.servers if asked.kind in server.known.terms.kinds]
        picked = _of_first_level(own, asked.streams, without)
        if picked is not None or any(server.admits and server not in without for server in own):
            return picked
        for each in self._stand_ins(own):
            others = [server for server in each.servers if asked.kind in server.known.terms.kinds]
            if (picked := _of_first_level(others, asked.streams, without)) is not None:
                return picked
        return None

    def unavailable(self, kind: Kind) -> errors.GatewayError:
        """What whoever asks hears while none is up."""
        if not self.serves(kind):
            return errors.InvalidRequest(f"The model '{self.model}' is not served for this.", param="model")
        after_s = min((server.opens_again_s for server in self._every(kind)), default=1.0)
        return UpstreamUnavailable(
            f"No server answers for the model '{self.model}' at the moment. Please try again.",
            retry_after_s=max(1.0, after_s),
        )


def _of_first_level(servers: Iterable[Server], streams: bool, without: Sequence[Server]) -> Server | None:
    """Of those of the smallest priority that can take one more."""
    able = [server for server in servers if server.admits and server.num_free and server not in without]
    if not able:
        return None
    least = min(server.known.terms.priority for server in able)
    level = [server for server in able if server.known.terms.priority == least]
    by_latency = any(server.known.terms.choice == "latency" for server in level)
    candidates = [server.candidate(streams) for server in level]
    return level[choose(candidates, (random.random(), random.random()), by_latency)]
