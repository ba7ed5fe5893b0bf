"""The sections of config.toml on grammars: what answers are held to."""

from __future__ import annotations

from policies.section import Positive, Seconds, Section, Threads


class Grammars(Section, frozen=True):
    """What answers are held to: schemas and other grammars, as requests bring them."""

    max_bytes: Positive = 1 << 20
    """Of one; a longer one is refused."""
    compile_s: Seconds = 10.0
    """Until then a grammar must have been read, or it is refused."""
    max_known: Positive = 1024
    """Of which the gateway remembers whether they can be kept to."""
    max_known_bytes: Positive = 16 << 20
    """Of those, the sources together."""
    num_threads: Threads = 2
    """That read them."""


class KeptGrammars(Section, frozen=True):
    """Grammars that a worker has compiled, and keeps for the next request; the one used longest ago goes first."""

    max_kept: Positive = 256
    max_kept_bytes: Positive = 16 << 20
    """Of their sources together; what they are compiled to is some times that."""
