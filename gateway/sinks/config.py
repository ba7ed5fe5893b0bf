"""Sinks from the settings, with their secrets from the environment."""

from __future__ import annotations

from collections.abc import Mapping

import yarl

from gateway.sinks import lago, stripe
from gateway.sinks.cloudevents import CloudEvents
from gateway.sinks.events import Kind
from gateway.sinks.lago import Lago
from gateway.sinks.stripe import Stripe
from gateway.sinks.webhook import Webhook
from gateway.webhooks import WebhookInvalid, secret_from
from policies.sinks import Sink

URLS = {"stripe": stripe.URL, "lago": lago.URL}
"""Where the settings name none."""


class SinkInvalid(Exception):
    """An address or a secret cannot be used; the message is one sentence for the operator."""


def url_of(name: str, sink: Sink) -> yarl.URL:
    """Where events are posted to. Raises SinkInvalid."""
    try:
        url = yarl.URL(sink.url or URLS[sink.kind])
    except ValueError:
        url = yarl.URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise SinkInvalid(f"sinks.{name}.url is no address such as https://host/path")
    if url.user is not None or url.password is not None:
        raise SinkInvalid(f"sinks.{name}.url has a user or a password in it; the key belongs into the environment")
    return url


def secrets_of(key: str, url: yarl.URL, sink: Sink) -> list[str]:
    """What a receiver may say back, and nothing may tell: the key, and what of the address may be as good as one."""
    is_ours = sink.kind == "webhook"
    return [key, url.raw_query_string, url.query_string, *([url.raw_path, url.path] if is_ours else [])]


def kind_of(name: str, sink: Sink, environ: Mapping[str, str], currency: str) -> tuple[Kind, str]:
    """How the receiver is spoken to, and the key, empty where there is none. Raises SinkInvalid."""
    key = environ.get(sink.key_variable, "").strip() if sink.key_variable else ""
    if sink.key_variable and not key:
        raise SinkInvalid(f"sinks.{name}.key_variable is {sink.key_variable}, which the environment does not have")
    if sink.kind == "webhook":
        try:
            return Webhook(secret_from(key, sink.key_variable), currency), key
        except WebhookInvalid as error:
            raise SinkInvalid(f"sinks.{name}: {error}") from None
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise SinkInvalid(f"sinks.{name}: what {sink.key_variable} holds is no key: it has blanks or other characters")
    if sink.kind == "stripe":
        return Stripe(key), key
    if sink.kind == "lago":
        return Lago(key), key
    return CloudEvents(key, sink.source), key
