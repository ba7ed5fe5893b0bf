"""What administrators send that is wrong, by resource: the method, the path, the body, and the field at fault.

TENANT and KEY stand for ids; there is an upstream ``spare`` of the model ``elsewhere``.
"""

from __future__ import annotations

from tests.gateway.bad_bodies.cases import HUGE, nested_text

SPARE = {"name": "spare", "model": "elsewhere", "url": "https://example.com/v1", "probe_s": 0}
LONG = "x" * 300
Asked = tuple[str, str, object, str]
"""Method, path, body, and the field that is named."""


def without(whole: dict[str, object], field: str) -> dict[str, object]:
    return {name: value for name, value in whole.items() if name != field}


def upstream(field: str, **others: object) -> Asked:
    return ("POST", "upstreams", {**SPARE, "name": "other", **others}, field)


def spare(field: str, **others: object) -> Asked:
    return ("PATCH", "upstreams/spare", others, field)


def adapter(field: str, **others: object) -> Asked:
    return ("POST", "adapters", {**ADAPTER, **others}, field)


def price(field: str, **others: object) -> Asked:
    return ("POST", "prices", {"price": {"prompt": "1"}, **others}, field)


def admin_key(field: str, **others: object) -> Asked:
    return ("POST", "admin_keys", {"name": "a", "role": "operator", **others}, field)


def key(field: str, **others: object) -> Asked:
    return ("POST", "keys", {"tenant_id": "TENANT", "name": "a", **others}, field)


def account(field: str, **others: object) -> Asked:
    return ("POST", "service_accounts", {"tenant_id": "TENANT", "name": "robot", **others}, field)


def correction(field: str, **others: object) -> Asked:
    return ("POST", "ledger/corrections", {"request_id": "req_1", "reason": "asked twice", **others}, field)


def trial(field: str, **question: object) -> Asked:
    return ("POST", "policies/default/trial", question, field)


def arriving(field: str, **others: object) -> Asked:
    arrival = {"at_s": 0, "tenant": "t", "model": "demo", "num_prompt_tokens": 5, "num_completion_tokens": 5, **others}
    return trial(f"arrivals[0].{field}", arrivals=[arrival])


def worker(field: str, **others: object) -> Asked:
    return trial(f"workers[...].{field}", arrivals=ARRIVALS, workers={"demo": others})


def failures(field: str, event_ids: object) -> Asked:
    return ("POST", "sinks/none/retry", {"event_ids": event_ids}, field)


def asked(path: str, field: str) -> Asked:
    return ("GET", path, None, field)


ADAPTER: dict[str, object] = {"name": "mine", "model": "demo", "source": "/adapters/mine"}
ARRIVALS = [{"at_s": 0, "tenant": "t", "model": "demo", "num_prompt_tokens": 5, "num_completion_tokens": 5}]
CASES: list[Asked] = [
    # Upstreams: what they are
    ("POST", "upstreams", without(SPARE, "name"), "name"),
    ("POST", "upstreams", without(SPARE, "model"), "model"),
    ("POST", "upstreams", without(SPARE, "url"), "url"),
    upstream("name", name=""),
    upstream("name", name=5),
    upstream("name", name="a b"),
    upstream("name", name="-a"),
    upstream("name", name="a\n"),
    upstream("name", name="x" * 129),
    upstream("model", model=""),
    upstream("model", model=5),
    upstream("model", model="a\nb"),
    upstream("model", model="x" * 257),
    upstream("model", model="demo"),
    upstream("url", url=""),
    upstream("url", url=5),
    upstream("url", url="example.com"),
    upstream("url", url="ftp://example.com/v1"),
    upstream("url", url="https://"),
    upstream("url", url="https:///v1"),
    upstream("url", url="https://me:secret@example.com/v1"),
    upstream("url", url="https://example.com/v1?key=x"),
    upstream("url", url="https://example.com/#v1"),
    upstream("url", url="https://exam ple.com"),
    upstream("url", url="https://example.com/\n"),
    upstream("url", url="https://[::1/v1"),
    upstream("url", url="https://example.com:0/v1"),
    upstream("url", url="https://example.com:99999/v1"),
    upstream("url", url="https://example.com:https/v1"),
    upstream("url", url="https://:443/v1"),
    upstream("url", url="https://example.com/" + "x" * 2048),
    upstream("upstream_model", upstream_model=5),
    upstream("upstream_model", upstream_model="x" * 257),
    upstream("key_variable", key_variable="PATH"),
    upstream("key_variable", key_variable="1A"),
    upstream("key_variable", key_variable="A B"),
    upstream("key", key=""),
    upstream("key", key=5),
    upstream("key", key="a b"),
    upstream("key", key="k\n"),
    upstream("key", key="schlüssel"),
    upstream("key", key="x" * 8193),
    upstream("kinds", kinds="chat"),
    upstream("kinds", kinds=[]),
    upstream("kinds[1]", kinds=["chat", "images"]),
    upstream("tokenizer", tokenizer="x" * 4097),
    upstream("urls", urls=["https://example.com/v1"]),
    # Upstreams: when and how they are asked
    upstream("overflow", overflow="yes"),
    upstream("overflow", overflow=True),
    upstream("weight", weight=0),
    upstream("weight", weight=-1),
    upstream("weight", weight=1000.5),
    upstream("weight", weight="1"),
    upstream("priority", priority=-1),
    upstream("priority", priority=101),
    upstream("priority", priority=1.5),
    upstream("choice", choice="random"),
    upstream("fallbacks", fallbacks="demo"),
    upstream("fallbacks", fallbacks=["elsewhere"]),
    upstream("fallbacks", fallbacks=["demo", "third"]),
    upstream("fallbacks", fallbacks=[f"m{number}" for number in range(9)]),
    upstream("fallbacks[0]", fallbacks=[""]),
    upstream("max_concurrent", max_concurrent=0),
    upstream("max_concurrent", max_concurrent=100_001),
    upstream("max_model_tokens", max_model_tokens=-1),
    upstream("max_model_tokens", max_model_tokens=HUGE),
    upstream("connect_timeout_s", connect_timeout_s=0),
    upstream("connect_timeout_s", connect_timeout_s=86_401),
    upstream("first_byte_timeout_s", first_byte_timeout_s=-1),
    upstream("idle_timeout_s", idle_timeout_s="60"),
    upstream("timeout_s", timeout_s=1e9),
    upstream("max_answer_bytes", max_answer_bytes=1023),
    upstream("max_answer_bytes", max_answer_bytes=2**31),
    upstream("max_retries", max_retries=11),
    upstream("max_retries", max_retries=-1),
    upstream("retry_share", retry_share=1.1),
    upstream("hedge", hedge=1),
    upstream("breaker_failures", breaker_failures=0),
    upstream("breaker_open_s", breaker_open_s=0),
    upstream("probe_s", probe_s=-1),
    # Upstreams: what is to be other than it is
    spare("name", name="other"),
    spare("model", model="demo"),
    spare("model", model=""),
    spare("url", url="example.com"),
    spare("url", url="https://[::1/v1"),
    spare("url", url=None),
    spare("key", key=""),
    spare("key_variable", key_variable="PATH"),
    spare("kinds", kinds=[]),
    spare("kinds[0]", kinds=["images"]),
    spare("overflow", overflow=True),
    spare("weight", weight=0),
    spare("priority", priority="first"),
    spare("choice", choice="x"),
    spare("fallbacks", fallbacks=["elsewhere"]),
    spare("max_concurrent", max_concurrent=0),
    spare("timeout_s", timeout_s=-1),
    spare("max_retries", max_retries=99),
    spare("probe_s", probe_s=1e9),
    # Adapters
    ("POST", "adapters", without(ADAPTER, "name"), "name"),
    ("POST", "adapters", without(ADAPTER, "model"), "model"),
    ("POST", "adapters", without(ADAPTER, "source"), "source"),
    adapter("name", name=""),
    adapter("name", name=5),
    adapter("name", name="a b"),
    adapter("name", name="../a"),
    adapter("name", name="x" * 129),
    adapter("name", name="demo"),
    adapter("model", model=""),
    adapter("model", model="none"),
    adapter("model", model=["demo"]),
    adapter("source", source=""),
    adapter("source", source=5),
    adapter("source", source="/a\0"),
    adapter("source", source="/a\nb"),
    adapter("source", source="x" * 4097),
    adapter("rank", rank=8),
    # Prices
    ("POST", "prices", {}, "price"),
    price("price", price="1"),
    price("price", price=[1]),
    price("price.prompt", price={"prompt": "-1"}),
    price("price.prompt", price={"prompt": "much"}),
    price("price.prompt", price={"prompt": []}),
    price("price.completion", price={"completion": "0.1234567"}),
    price("price.completion", price={"completion": "Infinity"}),
    price("price.reasoning", price={"reasoning": "NaN"}),
    price("price.request", price={"request": 10**7}),
    price("price.cached", price={"cached": "1"}),
    price("model", model=""),
    price("model", model=5),
    price("model", model="x" * 257),
    price("model", model="a\0"),
    price("sla_class", sla_class="gold"),
    price("sla_class", sla_class=5),
    price("currency", currency="XXX"),
    price("currency", currency=5),
    price("effective_from", effective_from=1),
    price("effective_from", effective_from=-1),
    price("effective_from", effective_from=10**18),
    price("effective_from", effective_from="now"),
    price("note", note="x" * 1025),
    price("note", note="a\0"),
    price("discount", discount="0.1"),
    # Keys of the administration and of tenants, and those that have them
    ("POST", "admin_keys", {"role": "owner"}, "name"),
    ("POST", "admin_keys", {"name": "a"}, "role"),
    admin_key("name", name=""),
    admin_key("role", role=5),
    admin_key("role", role="Owner"),
    admin_key("networks", networks="10.0.0.0/8"),
    admin_key("networks[0]", networks=["10.0.0.0/33"]),
    admin_key("expires_at", expires_at="never"),
    admin_key("key", key="sk-mine"),
    ("POST", "keys", {"name": "a"}, "tenant_id"),
    ("POST", "keys", {"tenant_id": "TENANT"}, "name"),
    key("name", name="a\0"),
    key("scopes", scopes="all"),
    key("scopes.endpoints", scopes={"endpoints": "chat.completions"}),
    key("scopes.endpoints", scopes={"endpoints": ["chat.completions"] * 17}),
    key("networks", networks="everywhere"),
    key("networks[0]", networks=[5]),
    key("networks[0]", networks=["10.0.0.1/8"]),
    key("narrowing", narrowing=[]),
    key("narrowing.models", narrowing={"models": "demo"}),
    key("narrowing.limits", narrowing={"limits": 5}),
    key("expires_at", expires_at=1.5),
    key("service_account_id", service_account_id="a b"),
    ("POST", "keys/KEY/rotate", {"overlap_s": "1"}, "overlap_s"),
    ("POST", "keys/KEY/rotate", {"name": "b"}, "name"),
    ("POST", "service_accounts", {"tenant_id": "TENANT"}, "name"),
    ("POST", "service_accounts", {"name": "robot"}, "tenant_id"),
    account("name", name=""),
    account("name", name=LONG),
    account("tenant_id", tenant_id=5),
    ("POST", "organizations", {}, "name"),
    ("POST", "organizations", {"name": "x", "tenants": []}, "tenants"),
    # Corrections of the ledger
    ("POST", "ledger/corrections", {"reason": "asked twice", "cost_micros": -5}, "request_id"),
    ("POST", "ledger/corrections", {"request_id": "req_1", "cost_micros": -5}, "reason"),
    correction("request_id", request_id="a b"),
    correction("request_id", request_id=5),
    correction("reason", reason=""),
    correction("reason", reason="a\0"),
    correction("reason", reason="x" * 1025),
    correction("num_prompt_tokens", num_prompt_tokens=1.5),
    correction("num_completion_tokens", num_completion_tokens="1"),
    correction("cost_micros", cost_micros=HUGE),
    correction("cost_micros", cost_micros=2**53 + 1),
    correction("cost", cost="1.5"),
    # Trials of a policy
    trial("arrivals", arrivals=[]),
    trial("arrivals", arrivals="all"),
    trial("arrivals[0]", arrivals=["one"]),
    arriving("at_s", at_s=-1),
    arriving("at_s", at_s="now"),
    arriving("tenant", tenant=""),
    arriving("model", model=5),
    arriving("num_prompt_tokens", num_prompt_tokens=0),
    arriving("num_completion_tokens", num_completion_tokens=1.5),
    arriving("max_completion_tokens", max_completion_tokens=0),
    arriving("ended_at", ended_at=5),
    worker("replicas", replicas=0),
    worker("weights", weights=[1]),
    worker("block_size", block_size=7),
    worker("speed", speed=5),
    trial("workers", arrivals=ARRIVALS, workers={}),
    trial("workers", arrivals=ARRIVALS, workers=["demo"]),
    trial("document.weight", arrivals=ARRIVALS, document={"weight": 0}),
    trial("document.sla_class", arrivals=ARRIVALS, document={"sla_class": "gold"}),
    trial("version", arrivals=ARRIVALS, version=0),
    trial("version", arrivals=ARRIVALS, version=2),
    trial("version", arrivals=ARRIVALS, version=1, document={}),
    trial("recorded", recorded={"since": 0, "until": 60}),
    trial("recorded.until", recorded={"since": 0}),
    trial("recorded.since", recorded={"since": "yesterday", "until": 60}),
    # Events that a sink's receiver refused
    failures("event_ids", []),
    failures("event_ids", "all"),
    failures("event_ids", ["e"] * 1001),
    ("POST", "sinks/none/retry", b'{"event_ids": ' + nested_text(b"[", b"]") + b"}", "event_ids[0]"),
    failures("event_ids[0]", [5]),
    failures("event_ids[0]", ["a b"]),
    failures("event_ids[1]", ["a", "x" * 101]),
    ("POST", "sinks/none/discard", {"events": ["a"]}, "events"),
    # What is added up and exported
    asked("usage", "since"),
    asked("usage?since=yesterday", "since"),
    asked("usage?since=-1", "since"),
    asked("usage?since=250000000000", "since"),
    asked("usage?since=600&until=60", "until"),
    asked("usage?since=60&bucket=week", "bucket"),
    asked("usage?since=60&bucket=minute", "bucket"),
    asked("usage?since=60&group_by=colour", "group_by"),
    asked("usage?since=60&group_by=model,model", "group_by"),
    asked("usage?since=60&group_by=model,", "group_by"),
    asked("usage?since=60&tenant_id=ten_none", "tenant_id"),
    asked("usage?since=60&key_id=key_none", "key_id"),
    asked("usage?since=60&model=%00", "model[0]"),
    asked("usage?since=60&" + "&".join(f"model={number}" for number in range(101)), "model"),
    asked("usage?since=60&limit=1001", "limit"),
    asked("usage?since=60&after=x", "after"),
    asked("costs?until=60", "since"),
    asked("costs?since=60&group_by=day", "group_by"),
    asked("exports/usage?to=2026-01-02", "from"),
    asked("exports/usage?from=yesterday&to=2026-01-02", "from"),
    asked("exports/usage?from=2026-02-30&to=2026-03-02", "from"),
    asked("exports/usage?from=2026-01-02&to=2026-01-02", "to"),
    asked("exports/usage?from=2020-01-01&to=2026-01-01", "to"),
    asked("exports/usage?from=9000-01-01&to=9000-01-02", "from"),
    asked("exports/usage?from=2026-01-01&to=2026-01-02&format=xls", "format"),
    asked("exports/usage?from=2026-01-01&to=2026-01-02&format=focus", "format"),
    asked("exports/usage?from=2026-01-01&to=2026-01-02&offset=-1", "offset"),
    asked("exports/costs?from=2026-01-01&to=2026-01-02&tenant=a%20b", "tenant"),
    asked("exports/costs?from=2026-01-01&to=2026-01-02&tenant=ten_none", "tenant"),
    # What is looked at
    asked("ledger/rows?status=99", "status"),
    asked("ledger/rows?status=ok", "status"),
    asked("ledger/rows?failed=maybe", "failed"),
    asked("ledger/rows?min_duration_ms=-1", "min_duration_ms"),
    asked("ledger/rows?min_duration_ms=nan", "min_duration_ms"),
    asked("ledger/rows?tenant_id=a%20b", "tenant_id"),
    asked("ledger/rows?end_user=%00", "end_user"),
    asked("ledger/rows?since=1.5", "since"),
    asked("ledger/days?order=random", "order"),
    asked("queues?model=", "model"),
    asked("queues?sla_class=a%20b", "sla_class"),
    asked("live?history=-1", "history"),
    asked("live?history=301", "history"),
    asked("audit_log?until=-1", "until"),
    asked("audit_log?action=a%20b", "action"),
    asked("audit_log?actor_key_id=%00", "actor_key_id"),
    asked("prices?at=now", "at"),
    asked("prices?model=", "model"),
    asked("upstreams?model=" + LONG, "model"),
    asked("adapters?model=%00", "model"),
    asked("admin_keys?role=king", "role"),
    asked("keys?revoked=perhaps", "revoked"),
    asked("models?limit=5", "limit"),
    asked("workers?model=demo", "model"),
    ("POST", "models/demo/load", {"at_once": True}, "at_once"),
    ("POST", "models/demo/pin", [], "body"),
    ("POST", "models/demo/unload?force=true", None, "force"),
]
