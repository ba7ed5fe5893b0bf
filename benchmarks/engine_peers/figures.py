"""What was measured, as figures: medians, ratios to ours, shares of what the machine can do."""

from __future__ import annotations

from statistics import median

import msgspec

from benchmarks.engine_peers.limits import Limits, best

BYTES_PER_WEIGHT = {"bf16": 2.0, "int8": 1.0, "int4": 0.5 + 4 / 64}
"""Of a matrix of ours; int4: codes, and a scale and an offset of two bytes each for each 64 of them."""


class Model(msgspec.Struct, frozen=True):
    """The sizes of the weights that all engines were given."""

    shape: str
    vocab_size: int
    num_matrix_weights: int
    """In all matrices that a decode step reads: the table of embeddings once, where it is the output's too."""
    num_layer_weights: int
    """Of those, in the layers: what each token of a prompt is multiplied with."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def kv_bytes(self, num_tokens: float) -> float:
        """Of one sequence, in bfloat16."""
        return 4.0 * self.num_layers * self.num_kv_heads * self.head_dim * num_tokens

    def prefill_flop(self, num_tokens: int) -> float:
        """Of one prompt: its matrices, each query's products with the keys and values before it, one row of logits."""
        attention = 2.0 * num_tokens * (num_tokens + 1) * self.num_layers * self.num_heads * self.head_dim
        head = 2.0 * (self.num_matrix_weights - self.num_layer_weights)
        return 2.0 * self.num_layer_weights * num_tokens + attention + head


class Point(msgspec.Struct):
    """One engine in one form, at one number of prompts at a time."""

    shape: str
    concurrency: int
    engine: str
    form: str
    version: str
    input_tokens: int
    output_tokens: int
    durations_s: list[float]
    """Of each round: the whole batch, all output tokens."""
    ttfts_s: list[float] = []
    """Of each round, for one prompt at a time: a request for a single token."""
    limits: list[Limits] = []
    """Of each round, for one prompt at a time: what the machine could do before or behind it."""
    others: list[float] = []
    """Of each round: CPUs that everything else on the machine had meanwhile."""
    weight_bytes: int | None = None
    """Where the engine says how many it reads."""
    first_tokens_alike: float | None = None
    """Share of answers whose first token is that of our bfloat16 engine; None where that one did not run."""
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.engine}:{self.form}"

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all sequences over the whole time, prefill included."""
        return self.concurrency * self.output_tokens / median(self.durations_s)

    @property
    def ttft_s(self) -> float | None:
        return median(self.ttfts_s) if self.ttfts_s else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """After the first token, for one prompt at a time."""
        return median(self.decode_rates) if self.ttfts_s else None

    @property
    def decode_rates(self) -> list[float]:
        """Of each round, tokens a second after the first token, for one prompt at a time."""
        pairs = zip(self.durations_s, self.ttfts_s, strict=False)
        return [(self.output_tokens - 1) / (whole - first) for whole, first in pairs]


class Report(msgspec.Struct):
    """Everything that was measured in one run, or in several that were merged."""

    began: str
    """Date and time of the first run, UTC."""
    commit: str
    machine: dict[str, str]
    num_threads: int
    models: dict[str, Model]
    points: list[Point] = []
    limits: dict[str, list[Limits]] = {}
    """Of each round, by shape."""
    failures: dict[str, str] = {}
    """Who could not be measured, by shape, prompts at a time and name, and why."""

    def limit(self, shape: str, name: str) -> float | None:
        """The best of all rounds."""
        return best(self.limits.get(shape, []), name)

    def decode_share(self, point: Point) -> float | None:
        """Of the bandwidth measured, that decoding one sequence used: weights and its keys and values, once a token."""
        weight_bytes = self.weight_bytes(point)
        if weight_bytes is None:
            return None
        bytes_per_token = weight_bytes + self.models[point.shape].kv_bytes(point.input_tokens + point.output_tokens / 2)
        # A small model's weights stay in the cache: its limit is how fast as many bytes can be read there.
        shares = [
            rate * bytes_per_token / (limits.weights_gb_per_s * 1e9)
            for rate, limits in zip(point.decode_rates, point.limits, strict=False)
            if limits.weights_gb_per_s is not None
        ]
        return median(shares) if shares else None

    def prefill_share(self, point: Point) -> float | None:
        """Of the rate of matrix products measured, that one prompt used until its first token."""
        if "4" in point.form:
            return None
        name = "bf16_tflop_per_s" if point.form.startswith("bf16") else "int8_tflop_per_s"
        flop = self.models[point.shape].prefill_flop(point.input_tokens)
        shares = [
            flop / ttft_s / (rate * 1e12)
            for ttft_s, limits in zip(point.ttfts_s, point.limits, strict=False)
            if (rate := getattr(limits, name)) is not None
        ]
        return median(shares) if shares else None

    def weight_bytes(self, point: Point) -> float | None:
        if point.weight_bytes:
            return point.weight_bytes
        each = BYTES_PER_WEIGHT.get(point.form)
        return None if each is None else each * self.models[point.shape].num_matrix_weights


def merged(reports: list[Report]) -> Report:
    """Points of the same engine, form, shape and number of prompts: their rounds together. Raises ValueError where the
    reports are of different commits, machines or numbers of threads.
    """
    first = reports[0]
    if any((each.commit, each.num_threads) != (first.commit, first.num_threads) for each in reports):
        raise ValueError("the reports are of different commits or numbers of threads")
    whole = Report(min(each.began for each in reports), first.commit, first.machine, first.num_threads, {})
    places: dict[tuple[str, int, str], Point] = {}
    for report in reports:
        whole.models |= report.models
        whole.failures |= report.failures
        for shape, limits in report.limits.items():
            whole.limits[shape] = whole.limits.get(shape, []) + limits
        for point in report.points:
            key = (point.shape, point.concurrency, point.name)
            if key in places:
                places[key].durations_s += point.durations_s
                places[key].ttfts_s += point.ttfts_s
                places[key].others += point.others
                places[key].limits += point.limits
            else:
                places[key] = point
    whole.points = sorted(places.values(), key=lambda point: (point.shape, point.concurrency))
    return whole
