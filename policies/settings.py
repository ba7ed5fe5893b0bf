"""The shape of config.toml, checked as a whole.

``load`` merges the defaults here, the file and ``PENSTOCK_SECTION__KEY`` variables, then converts strictly.
An unknown key, a wrong type or a value out of range is a ``SettingsError`` of one sentence that names the key.
The text of the file and the variables are arguments; nothing here opens anything.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from policies import faults
from policies.policy import Policy
from policies.pricelist import Proposed
from policies.sinks import Sink, faults_of

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Share = Annotated[float, Meta(gt=0, le=0.95)]


class SettingsError(ValueError):
    """config.toml, or a variable that overrides it, cannot be used; the message is one sentence for the operator."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections."""


class Server(Section, frozen=True):
    """The HTTP server."""

    host: str = "127.0.0.1"
    port: Port = 8080
    """0: any free port; the ready line names it."""
    max_body_bytes: Positive = 16 << 20
    drain_s: Seconds = 30.0
    """After SIGTERM: how long running answers may take to finish before they are cut."""
    max_stream_buffer_bytes: Positive = 256 << 10
    """Bytes of one stream that may wait in its socket; past it only token ids are kept until the client reads on."""
    stall_s: Seconds = 60.0
    """How long a client may read nothing at all before its stream is given up."""
    processes: Annotated[int, Meta(ge=1, le=64)] = 1
    """Gateway processes on this port; more than one share Redis and PostgreSQL."""


class Store(Section, frozen=True):
    """Tenants, keys and the ledger."""

    data_dir: str = "data"
    url: str = ""
    """SQLAlchemy URL of PostgreSQL (postgresql+asyncpg://...); empty: SQLite in data_dir."""
    ledger_flush_ms: Annotated[float, Meta(ge=0)] = 2.0
    """How long a finished request may wait for others to share its commit."""
    max_ledger_backlog: Positive = 100_000
    """Rows waiting to be written before new requests are refused."""


class Ledger(Section, frozen=True):
    """What is owed, also when a process or the machine dies in the middle of an answer."""

    mark_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 64
    """Completion tokens that a stream's client may be ahead of what the disk knows to have been delivered: at most so
    many of a stream are not owed when the machine is lost."""
    close_after_s: Annotated[float, Meta(ge=0)] = 3600.0
    """After the end of a day (UTC) its rows are closed under one digest; rows that come later fall to the next day."""


class SlaClass(Section, frozen=True, kw_only=True):
    """A class of service: what it promises, how long and how many may wait for it, and what it gets of the engine."""

    priority: Annotated[int, Meta(ge=0, le=15)]
    """Smaller goes first, in the queue and in the engine, once every class has its guaranteed share."""
    ttft_ms: Annotated[float, Meta(gt=0)]
    """Target of the time to the first token; also the deadline by which a tenant's own requests are ordered."""
    tpot_ms: Annotated[float, Meta(gt=0)]
    """Target of the time for each further token."""
    max_ttft_ms: Annotated[float, Meta(ge=0)] = 0.0
    """A request whose first token is predicted later is refused at once; 0: only ``max_wait_s`` counts."""
    share: Annotated[float, Meta(gt=0, le=1)]
    """Of the tokens served while it has requests waiting, this much is its own, whatever the others ask for."""
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    """Share, among classes of equal priority, of what the guarantees leave over."""
    max_wait_s: Seconds = 120.0
    """A request that waited so long for a worker is refused with 408."""
    max_waiting: Positive = 1024
    """Requests that one model holds in line for this class; one more is refused with 503."""
    service_tier: Literal["", "default", "flex", "priority"] = ""
    """The ``service_tier`` by which requests ask for it."""


CLASSES = {
    "interactive": SlaClass(
        priority=0,
        ttft_ms=1000.0,
        tpot_ms=100.0,
        max_ttft_ms=20_000.0,
        share=0.5,
        max_wait_s=20.0,
        service_tier="priority",
    ),
    "standard": SlaClass(
        priority=1, ttft_ms=5000.0, tpot_ms=200.0, share=0.3, max_wait_s=120.0, service_tier="default"
    ),
    "batch": SlaClass(priority=2, ttft_ms=600_000.0, tpot_ms=1000.0, share=0.1, max_wait_s=3600.0, service_tier="flex"),
}
"""Where the settings name none."""


class Limits(Section, frozen=True):
    """How limits are kept; what they are, policies say."""

    completion_estimate: Positive = 256
    """Completion tokens set aside for an answer when it is admitted, or what it asked for if that is less; it is topped
    up by as many while it is written."""


class Cache(Section, frozen=True):
    """Exact answers, and answers to repeated Idempotency-Keys."""

    max_bytes: NonNegative = 64 << 20
    """Of answers kept in this process's memory; 0: none are kept, though equal requests still share one flight."""
    max_entry_bytes: Positive = 1 << 20
    """A longer answer is not kept."""
    idempotency_ttl_s: Positive = 86_400
    """How long the same Idempotency-Key gives the same answer."""


class Redis(Section, frozen=True):
    """What several gateways share besides the store: limits, exact answers, live counters, notices of change."""

    url: str = ""
    """"redis://host:6379/0"; empty: this gateway is alone and keeps all of it in memory."""
    prefix: str = "penstock:"
    """Of all keys."""
    timeout_ms: Annotated[float, Meta(gt=0)] = 50.0
    """Of one command; longer counts as gone."""
    retry_s: Seconds = 2.0
    """After a failure Redis is not asked for so long; then one command tries it."""


class Billing(Section, frozen=True):
    """Money."""

    currency: Annotated[str, Meta(pattern=r"^[A-Z]{3}$")] = "USD"
    """ISO 4217; all prices and budgets are in it."""
    webhook_url: str = ""
    """Where budget alerts are posted, signed; empty: they are only logged."""


class Workers(Section, frozen=True):
    """Worker processes and their sockets."""

    start_timeout_s: Seconds = 600.0
    """From start to ready, weights loaded; longer is a failed start."""
    silence_timeout_s: Seconds = 30.0
    """Without a frame for so long a worker counts as stuck and is replaced."""
    restart_backoff_s: Seconds = 0.5
    """Before the first restart; doubles with each failure in a row, up to max_restart_backoff_s."""
    max_restart_backoff_s: Seconds = 30.0
    max_send_buffer_bytes: Positive = 64 << 20
    """Frames waiting for one worker to read them; past it the worker counts as stuck."""


class Text(Section, frozen=True):
    """Prompts to tokens."""

    inline_chars: Positive = 4096
    """Prompts up to this length are tokenised on the event loop; longer ones on a thread."""
    num_threads: Positive = 1


class Log(Section, frozen=True):
    """Logs on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["console", "json"] = "console"


class Engine(Section, frozen=True):
    """One worker's engine; ``[models.NAME.engine]`` overrides single keys for one model."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda when there is one."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """auto: bfloat16 where the device computes it natively, float32 elsewhere."""
    num_threads: NonNegative = 0
    """CPU threads; 0: one a physical core, less one for the gateway from four cores up."""
    kv_memory_share: Share = 0.3
    """Share of the memory free after the weights are loaded that becomes KV blocks."""
    max_kv_bytes: NonNegative = 0
    """Upper bound of the same; 0: none."""
    block_size: Annotated[int, Meta(ge=8, le=256)] = 32
    """Tokens a KV block."""
    max_model_tokens: NonNegative = 0
    """Prompt and completion together; 0: what the model's files say."""
    max_sequences: Positive = 256
    """Sequences in one batch."""
    max_step_tokens: Positive = 2048
    """Tokens of one step, prefill and decode together."""
    max_prefill_tokens_beside_decodes: Positive = 2048
    """Of those, prompt tokens beside answers being written: fewer keep streams smoother, more start answers sooner."""
    max_slowdown: Annotated[float, Meta(ge=0)] = 1.8
    """Fewer still, so that a step takes at most so many times as long as its answers alone would (more where
    several prompts wait beside few answers); 0: no such limit."""
    prefix_cache: bool = True
    attention: Literal["auto", "torch", "reference"] = "auto"
    """auto: the fastest that works here; torch: without compiled kernels; reference: the plain one, for comparison."""


class Model(Section, frozen=True):
    """One served model, named as clients ask for it."""

    source: str = "demo"
    """A directory in Hugging Face layout, a hub id, or "demo"."""
    replicas: NonNegative = 1
    """Worker processes to start here."""
    addresses: tuple[str, ...] = ()
    """Workers that run already elsewhere: "unix:/path" or "tcp:host:port"."""
    engine: Engine = Engine()


class Settings(Section, frozen=True):
    """The whole of config.toml."""

    server: Server = Server()
    store: Store = Store()
    ledger: Ledger = Ledger()
    classes: dict[str, SlaClass] = msgspec.field(default_factory=lambda: dict(CLASSES))
    policies: dict[str, Policy] = msgspec.field(default_factory=lambda: {"default": Policy()})
    """Made in the store when it has none of that name; from then on the store's word counts."""
    prices: tuple[Proposed, ...] = ()
    """Put on the price list when it has never had one of that model and class; from then on the list's word counts."""
    sinks: dict[str, Sink] = {}
    """Who is sent the ledger's rows as events."""
    limits: Limits = Limits()
    cache: Cache = Cache()
    redis: Redis = Redis()
    billing: Billing = Billing()
    workers: Workers = Workers()
    text: Text = Text()
    log: Log = Log()
    engine: Engine = Engine()
    models: dict[str, Model] = {}
    """Empty: the demo model under the name "demo"."""


class WorkerSettings(Section, frozen=True):
    """What one worker process is told, as JSON on its command line."""

    name: str
    """For logs and metrics: "demo-0"."""
    model: str
    """As clients name it."""
    source: str
    listen: str
    """ "unix:/path" or "tcp:host:port"."""
    exit_with_stdin: bool = False
    """The end of standard input means that the parent is gone: stop."""
    engine: Engine = Engine()


def load(text: str, environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None) -> Settings:
    """The settings from a file's text, the environment and command-line overrides ({"server.port": 9000}); last wins.

    Raises SettingsError.
    """
    try:
        # Decimals, so that money is what was written; other numbers become floats when they are converted.
        raw: dict[str, Any] = tomllib.loads(text, parse_float=Decimal)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"config.toml is not valid TOML: {error}") from None
    for path, value in _variables(environ):
        _put(raw, path, value)
    for name, value in (overrides or {}).items():
        _put(raw, name.split("."), value)
    _refuse_unknown(raw, Settings, "")
    named = raw.get("classes", {})
    if isinstance(named, dict):
        defaults = {name: {**msgspec.structs.asdict(entry), **named.get(name, {})} for name, entry in CLASSES.items()}
        raw["classes"] = {**named, **defaults}
    models = raw.get("models")
    for model in models.values() if isinstance(models, dict) else ():
        if isinstance(model, dict):
            model["engine"] = {**_table(raw, "engine"), **_table(model, "engine")}
    try:
        settings = msgspec.convert(raw, Settings, strict=True)
    except msgspec.ValidationError as error:
        raise SettingsError(f"config.toml: {_readable(str(error))}") from None
    if not settings.models:
        settings = msgspec.structs.replace(settings, models={"demo": Model(engine=settings.engine)})
    for name, served in settings.models.items():
        if not served.replicas and not served.addresses:
            what = "has neither replicas nor addresses, so nothing can answer for it"
            raise SettingsError(f"config.toml: models.{name} {what}")
    _check_classes(settings)
    _check_billing(settings)
    _check_sharing(settings)
    return settings


def _check_classes(settings: Settings) -> None:
    classes = settings.classes
    if sum(sla_class.share for sla_class in classes.values()) > 1 + 1e-9:
        raise SettingsError("config.toml: classes: their shares are more than 1 together, so they cannot be guaranteed")
    tiers = [sla_class.service_tier for sla_class in classes.values() if sla_class.service_tier]
    if len(set(tiers)) < len(tiers):
        raise SettingsError("config.toml: classes: two of them have the same service_tier")
    for name, policy in settings.policies.items():
        for path, what in faults.of_policy(policy, classes):
            raise SettingsError(f"config.toml: policies.{name}.{path}: {what}")


def _check_billing(settings: Settings) -> None:
    for path, what in faults_of(settings.sinks):
        raise SettingsError(f"config.toml: {path}: {what}")
    seen: dict[tuple[str, str], int] = {}
    for number, proposed in enumerate(settings.prices):
        for path, what in faults.of_proposed(proposed, settings.classes, settings.billing.currency):
            raise SettingsError(f"config.toml: prices[{number}].{path}: {what}")
        if (other := seen.setdefault((proposed.model, proposed.sla_class), number)) != number:
            raise SettingsError(f"config.toml: prices[{number}] is for the same model and class as prices[{other}]")


def _check_sharing(settings: Settings) -> None:
    missing = [name for name, url in (("redis.url", settings.redis.url), ("store.url", settings.store.url)) if not url]
    if settings.server.processes > 1 and missing:
        raise SettingsError(
            f"config.toml: server.processes is {settings.server.processes}, but {' and '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} empty, so the processes have nothing to share limits and keys in"
        )


def _variables(environ: Mapping[str, str]) -> Iterator[tuple[list[str], Any]]:
    """PENSTOCK_SERVER__PORT=9000 as (["server", "port"], 9000); a value that is no TOML literal is a string."""
    for name, text in sorted(environ.items()):
        if name.startswith("PENSTOCK_") and "__" in name:
            path = name.removeprefix("PENSTOCK_").lower().split("__")
            try:
                value = tomllib.loads(f"value = {text}", parse_float=Decimal)["value"]
            except tomllib.TOMLDecodeError:
                value = text
            yield path, value


def _put(raw: dict[str, Any], path: list[str], value: Any) -> None:
    table = raw
    for key in path[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise SettingsError(f"config.toml: {'.'.join(path)} cannot be set, because {key} is no table")
    table[path[-1]] = value


def _table(raw: dict[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key, {})
    return value if isinstance(value, dict) else {}


_NAMED: dict[str, type[msgspec.Struct]] = {"models": Model, "classes": SlaClass, "policies": Policy, "sinks": Sink}
"""Tables of tables."""
_NUMBERED: dict[str, type[msgspec.Struct]] = {"prices": Proposed}
"""Arrays of tables."""


def _refuse_unknown(raw: dict[str, Any], shape: type[msgspec.Struct], where: str) -> None:
    known = {field.name: field for field in msgspec.structs.fields(shape)}
    hints = get_type_hints(shape)
    for key, value in raw.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {where}{near[0]}?" if near else ""
            raise SettingsError(f"config.toml: unknown key {where}{key}{hint}")
        if key in _NAMED and isinstance(value, dict):
            for name, entry in value.items():
                if not isinstance(entry, dict):
                    raise SettingsError(f"config.toml: {key}.{name}: expected a table, got `{type(entry).__name__}`")
                _refuse_unknown(entry, _NAMED[key], f"{key}.{name}.")
        elif key in _NUMBERED and isinstance(value, list):
            for number, entry in enumerate(value):
                if isinstance(entry, dict):
                    _refuse_unknown(entry, _NUMBERED[key], f"{key}[{number}].")
        elif isinstance(value, dict) and isinstance(hints[key], type) and issubclass(hints[key], msgspec.Struct):
            _refuse_unknown(value, hints[key], f"{where}{key}.")


def _readable(error: str) -> str:
    """ "Expected `int`, got `str` - at `$.server.port`" as "server.port: expected `int`, got `str`"."""
    found = re.fullmatch(r"(?s)(.*?) - at `(?:key in )?\$\.?(.*)`", error)
    return f"{found[2]}: {found[1][0].lower()}{found[1][1:]}" if found else error
