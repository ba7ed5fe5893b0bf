"""config.toml and the environment to settings, checked as a whole.

``load`` merges the defaults of ``settings``, the file and ``PENSTOCK_SECTION__KEY`` variables, then converts strictly.
An unknown key, a wrong type or a value out of range is a ``SettingsError`` of one sentence that names the key.
The text of the file and the variables are arguments; nothing here opens anything.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
import tomllib
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeVar, get_type_hints

import msgspec

from policies import devices, faults
from policies.choices import told_choices
from policies.observing import is_collector
from policies.policy import Policy
from policies.pricelist import Proposed
from policies.settings import CLASSES, Model, Server, Settings, SlaClass
from policies.sinks import Sink, faults_of
from policies.upstreams import terms as upstreams

Shape = TypeVar("Shape", bound=msgspec.Struct)


class SettingsError(ValueError):
    """The settings cannot be used; the message is one sentence for the operator, which begins with the name of the file
    or of the variable that says so."""


class _Fault(Exception):
    """What is wrong with a key, wherever that was said."""

    def __init__(self, key: str, what: str) -> None:
        super().__init__(f"{key}: {what}")
        self.key = key


class _UnknownKey(_Fault):
    def __init__(self, key: str, nearest: str | None) -> None:
        super().__init__(key, "unknown")
        self._hint = f"; did you mean {nearest}?" if nearest else ""

    def __str__(self) -> str:
        return f"unknown key {self.key}{self._hint}"


def load(
    text: str, environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None, name: str = "config.toml"
) -> Settings:
    """The settings from the text of the file ``name``, the environment and command-line overrides
    ({"server.port": 9000}); last wins.

    Raises SettingsError.
    """
    try:
        # Decimals, so that money is what was written; other numbers become floats when they are converted.
        raw: dict[str, Any] = tomllib.loads(text, parse_float=Decimal)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{name} is not valid TOML: {error}") from None
    try:
        return _checked(raw, environ, overrides or {})
    except _Fault as fault:
        raise SettingsError(f"{_origin(fault.key, environ) or name}: {fault}") from None


def misspelt(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Variables that set nothing, each with the one that probably was meant: an underscore where two belong."""
    sections = get_type_hints(Settings)
    for name, value in environ.items():
        section, _, key = name.removeprefix("PENSTOCK_").lower().partition("_")
        meant = f"PENSTOCK_{section}__{key}".upper()
        is_key = key in getattr(sections.get(section), "__struct_fields__", ())
        # Kubernetes tells pods of a service "penstock-server" by PENSTOCK_SERVER_PORT=tcp://10.0.0.1:80.
        is_service = value.startswith(("tcp://", "udp://", "sctp://"))
        if name.startswith("PENSTOCK_") and is_key and not is_service and meant not in environ:
            yield name, meant


def _checked(raw: dict[str, Any], environ: Mapping[str, str], overrides: Mapping[str, Any]) -> Settings:
    """Raises _Fault."""
    for _, path, value in _variables(environ):
        _put(raw, path, value)
    for key, value in overrides.items():
        _put(raw, key.split("."), value)
    _refuse_unknown(raw, Settings, "")
    _refuse_nul(raw, "")
    _refuse_brackets(raw)
    named = raw.get("classes", {})
    if isinstance(named, dict):
        defaults = {name: {**msgspec.structs.asdict(entry), **named.get(name, {})} for name, entry in CLASSES.items()}
        raw["classes"] = {**named, **defaults}
    for model in _table(raw, "models").values():
        if isinstance(model.setdefault("engine", {}), dict):
            model["engine"] = _merged(_table(raw, "engine"), model["engine"])
    for key, shape in _NAMED.items():
        for name, entry in _table(raw, key).items():  # of the whole it would be said without the name
            _converted(entry, shape, f"{key}.{name}")
    settings = _converted(raw, Settings, "")
    if not settings.models and not settings.upstreams:
        settings = msgspec.structs.replace(settings, models={"demo": Model(engine=settings.engine)})
    for name, served in settings.models.items():
        if not served.replicas and not served.addresses:
            raise _Fault(f"models.{name}", "it has neither replicas nor addresses, so nothing can answer for it")
        for number, address in enumerate(served.addresses):
            if not re.fullmatch(r"unix:.+|tcp:.+:[0-9]{1,5}", address) or _port_of(address) > 65535:
                raise _Fault(f"models.{name}.addresses[{number}]", 'it is neither "unix:/path" nor "tcp:host:port"')
    _check_server(settings.server)
    _check_devices(settings)
    _check_residency(settings)
    _check_adapters(settings)
    _check_classes(settings)
    _check_billing(settings)
    _check_sharing(settings)
    _check_observing(settings)
    for number, field, what in upstreams.faults_of(settings.upstreams, settings.models):
        raise _Fault(f"upstreams[{number}].{field}", what)
    return settings


def _port_of(address: str) -> int:
    """0 where it has none."""
    return int(address.rpartition(":")[2]) if address.startswith("tcp:") else 0


def _check_server(server: Server) -> None:
    if bool(server.tls_cert) != bool(server.tls_key):
        lacking = "tls_key" if server.tls_cert else "tls_cert"
        raise _Fault(f"server.{lacking}", "a certificate and its key are needed, or neither")
    for network in server.trusted_proxies:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise _Fault("server.trusted_proxies", str(error)) from None


def _check_devices(settings: Settings) -> None:
    for name, served in settings.models.items():
        engine = served.engine
        num_ranks = engine.tensor_parallel * engine.pipeline_parallel
        fault = None if engine.device == "cpu" else devices.fault_of(engine.devices, served.replicas, num_ranks)
        if fault is not None:
            raise _Fault(f"models.{name}.engine.devices", fault)


def _check_residency(settings: Settings) -> None:
    for name, served in settings.models.items():
        comes_and_goes = served.idle_unload_s > 0 or not served.load_at_start
        key = "load_at_start" if not served.load_at_start else "idle_unload_s"
        if comes_and_goes and served.addresses:
            raise _Fault(f"models.{name}.{key}", "it has workers elsewhere, which are not this gateway's to unload")


def _check_adapters(settings: Settings) -> None:
    seen: dict[str, str] = {}
    for model, served in settings.models.items():
        for name in served.adapters:
            if name in settings.models:
                raise _Fault(f"models.{model}.adapters.{name}", "a model has this name already")
            if (other := seen.setdefault(name, model)) != model:
                raise _Fault(f"models.{model}.adapters.{name}", f"the model {other} has one of this name")


def _check_classes(settings: Settings) -> None:
    classes = settings.classes
    if sum(sla_class.share for sla_class in classes.values()) > 1 + 1e-9:
        raise _Fault("classes", "their shares are more than 1 together, so they cannot be guaranteed")
    tiers = [sla_class.service_tier for sla_class in classes.values() if sla_class.service_tier]
    if len(set(tiers)) < len(tiers):
        raise _Fault("classes", "two of them have the same service_tier")
    for name, policy in settings.policies.items():
        for path, what in faults.of_policy(policy, classes):
            raise _Fault(f"policies.{name}.{path}", what)


def _check_billing(settings: Settings) -> None:
    for path, what in faults_of(settings.sinks):
        raise _Fault(path, what)
    seen: dict[tuple[str, str], int] = {}
    for number, proposed in enumerate(settings.prices):
        for path, what in faults.of_proposed(proposed, settings.classes, settings.billing.currency):
            raise _Fault(f"prices[{number}].{path}", what)
        if (other := seen.setdefault((proposed.model, proposed.sla_class), number)) != number:
            raise _Fault(f"prices[{number}]", f"it is for the same model and class as prices[{other}]")


def _check_sharing(settings: Settings) -> None:
    missing = [name for name, url in (("redis.url", settings.redis.url), ("store.url", settings.store.url)) if not url]
    if settings.server.processes > 1 and missing:
        raise _Fault(
            "server.processes",
            f"{settings.server.processes} of them have nothing to share limits and keys in, because "
            f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} empty",
        )


def _check_observing(settings: Settings) -> None:
    metrics, tracing = settings.metrics, settings.tracing
    if metrics.otlp_endpoint and not is_collector(metrics.otlp_endpoint, metrics.otlp_protocol == "grpc"):
        raise _Fault("metrics.otlp_endpoint", "it is no address of a collector such as http://127.0.0.1:4318")
    # Without a protocol, variables of OpenTelemetry may say one.
    if tracing.endpoint and not is_collector(tracing.endpoint, tracing.protocol != "http/protobuf"):
        raise _Fault("tracing.endpoint", "it is no address of a collector such as http://127.0.0.1:4317")


def _variables(environ: Mapping[str, str]) -> Iterator[tuple[str, list[str], Any]]:
    """PENSTOCK_SERVER__PORT=9000 as (that name, ["server", "port"], 9000); what is no TOML literal is a string."""
    for name, text in sorted(environ.items()):
        if name.startswith("PENSTOCK_") and "__" in name:
            path = name.removeprefix("PENSTOCK_").lower().split("__")
            try:
                value = tomllib.loads(f"value = {text}", parse_float=Decimal)["value"]
            except tomllib.TOMLDecodeError:
                value = text
            yield name, path, value


def _origin(key: str, environ: Mapping[str, str]) -> str | None:
    """The variable that set ``key``, or what it is part of, or a part of it; None: none did."""
    parts = re.split(r"[.\[]", key)
    for name, path, _ in _variables(environ):
        if path[: len(parts)] == parts[: len(path)]:
            return name
    return None


def _put(raw: dict[str, Any], path: list[str], value: Any) -> None:
    table = raw
    for key in path[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise _Fault(".".join(path), f"it cannot be set, because {key} is no table")
    table[path[-1]] = value


def _table(raw: dict[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key, {})
    return value if isinstance(value, dict) else {}


def _merged(table: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``table`` with what ``over`` says otherwise, key by key, also of the tables in it."""
    said = {
        key: _merged(table[key], value) if isinstance(value, dict) and isinstance(table.get(key), dict) else value
        for key, value in over.items()
    }
    return {**table, **said}


def _converted(raw: dict[str, Any], shape: type[Shape], where: str) -> Shape:
    """Raises _Fault."""
    try:
        return msgspec.convert(raw, shape, strict=True)
    except msgspec.ValidationError as error:
        raise _of_type(str(error), where, shape) from None


_NAMED: dict[str, type[msgspec.Struct]] = {"models": Model, "classes": SlaClass, "policies": Policy, "sinks": Sink}
"""Tables of tables."""
_NUMBERED: dict[str, type[msgspec.Struct]] = {"prices": Proposed, "upstreams": upstreams.Upstream}
"""Arrays of tables."""


def _refuse_unknown(raw: dict[str, Any], shape: type[msgspec.Struct], where: str) -> None:
    known = {field.name: field for field in msgspec.structs.fields(shape)}
    hints = get_type_hints(shape)
    for key, value in raw.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise _UnknownKey(f"{where}{key}", f"{where}{near[0]}" if near else None)
        if key in _NAMED and isinstance(value, dict):
            for name, entry in value.items():
                if not isinstance(entry, dict):
                    raise _Fault(f"{key}.{name}", f"expected a table, got `{type(entry).__name__}`")
                _refuse_unknown(entry, _NAMED[key], f"{key}.{name}.")
        elif key in _NUMBERED and isinstance(value, list):
            for number, entry in enumerate(value):
                if isinstance(entry, dict):
                    _refuse_unknown(entry, _NUMBERED[key], f"{key}[{number}].")
        elif isinstance(value, dict) and isinstance(hints[key], type) and issubclass(hints[key], msgspec.Struct):
            _refuse_unknown(value, hints[key], f"{where}{key}.")


def _refuse_brackets(raw: dict[str, Any]) -> None:
    """[upstreams] where [[upstreams]] belongs, or the reverse, of which its type would say less."""
    for key in _NUMBERED:
        if isinstance(raw.get(key), dict):
            raise _Fault(key, f"each of them begins with [[{key}]], in two brackets")
    for key in _NAMED:
        if isinstance(raw.get(key), list):
            raise _Fault(key, f"each of them has its name in its heading: [{key}.NAME], in single brackets")


def _refuse_nul(value: Any, key: str) -> None:
    """No path, address or name can have one, and what opens them would fail at it."""
    if isinstance(value, str) and "\0" in value:
        raise _Fault(key, "it has a NUL character in it")
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, entry in entries:
        _refuse_nul(entry, f"{key}[{name}]" if isinstance(value, list) else f"{key}.{name}".lstrip("."))


def _of_type(error: str, where: str, shape: type[msgspec.Struct]) -> _Fault:
    """ "Expected `int`, got `str` - at `$.server.port`" as "server.port: expected `int`, got `str`"; of a key that will
    not do it is "at `key` in", and of the whole nothing. ``shape``: of what is at ``where``."""
    found = re.fullmatch(r"(?s)(.*?)(?: - at (`key` in )?`\$\.?(.*)`)?", error)
    assert found is not None, "any text is one"
    key = ".".join(filter(None, [where, found[3]]))
    what = told_choices(found[1], shape, found[3] or "", bool(found[2]))
    return _Fault(key or "settings", f"{what[0].lower()}{what[1:]}")
