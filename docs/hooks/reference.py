"""Pages that the code writes: what config.toml holds, what /openapi.json describes, what is measured, what goes wrong.

MkDocs calls ``on_files`` before it reads the pages. Nothing is written into the tree.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from gateway import metrics, openapi
from gateway.admin.problems import Problem
from gateway.errors import GatewayError
from gateway.openai.extras import REFUSED

ROOT = Path(__file__).parents[2]
INFERENCE = "Inference"
VERBS = ("get", "post", "put", "patch", "delete")

_SECTION = re.compile(r"(?P<example># )?\[+(?P<name>[A-Za-z_.]+)\]+(?:\s+# (?P<what>.*))?")
_MORE = re.compile(r"#\s{10,}(?P<what>.*)")
_KEY = re.compile(r"(?:# )?(?P<name>[a-z_0-9]+) = (?P<default>.*?)(?:\s{2,}# ?(?P<what>.*)|\s+# (?P<short>.*))?")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {
        "reference/config.md": settings((ROOT / "config.toml").read_text()),
        "reference/rest.md": rest(),
        "reference/metrics.md": measured(),
        "reference/errors.md": failing(),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def settings(text: str) -> str:
    """config.toml as a page: a table for each of its sections."""
    parts = [
        "# Settings",
        "`penstock` reads `config.toml` in the directory it is started in, or what `--config` names. Every key has a"
        " default, and any of them can come from the environment instead: `PENSTOCK_SERVER__PORT=9000`. A key that is"
        " not known is an error that names the nearest one.",
    ]
    section, said = "", list[str]()
    for line in text.splitlines():
        if found := _SECTION.fullmatch(line):
            section = found["name"]
            column = "example" if found["example"] else "default"
            said += [f"For example: `{found['what'].removeprefix('e.g. ')}`."] if found["what"] else []
            parts += [
                f"## `[{section}]`",
                *([" ".join(said)] if said else []),
                "",
                f"| key | {column} | what it is |",
                "|---|---|---|",
            ]
            said = []
        elif (found := _MORE.fullmatch(line)) and parts[-1].startswith("|"):
            parts[-1] = f"{parts[-1].removesuffix(' |')} {_cell(found['what'])} |"
        elif section and (found := _KEY.fullmatch(line)) and _is_value(found["default"]):
            variable = f"PENSTOCK_{section}__{found['name']}".upper().replace(".", "__")
            what = _cell(found["what"] or found["short"] or "")
            parts.append(
                f'| <span title="{variable}">`{found["name"]}`</span> | `{_cell(found["default"])}` | {what} |'
            )
            said = []
        elif line.startswith("#"):
            said.append(line.lstrip("# "))
        elif not line:
            said = []
    return "\n".join(_spaced(parts))


def _spaced(parts: list[str]) -> Iterator[str]:
    """With an empty line before and after everything that is not a row of a table."""
    for part in parts:
        yield from (part,) if part.startswith("|") else ("", part, "")


def _is_value(text: str) -> bool:
    """Of TOML, and not the rest of a sentence."""
    try:
        tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return False
    return True


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def rest() -> str:
    """/openapi.json as a page: every operation, what it takes and what it answers."""
    described = msgspec.json.decode(openapi.document())
    schemas = described["components"]["schemas"]
    groups: dict[str, list[str]] = {}
    for path, operations in described["paths"].items():
        for verb in VERBS:
            if verb in operations:
                groups.setdefault(_group(path), []).append(_operation(verb, path, operations[verb], schemas))
    parts = [
        "# REST",
        "What a running gateway describes at `/openapi.json`. Paths under `/v1` take a key of a tenant as bearer, those"
        " under `/admin/v1` and `/v1/organization` an admin key. `/healthz`, `/readyz` and `/health` take none"
        " ([run it for good](../how-to/running.md#health)).",
    ]
    for group in sorted(groups, key=lambda group: (group != INFERENCE, group)):
        parts += [f"## {group}", *groups[group]]
    return "\n\n".join(parts)


def _group(path: str) -> str:
    first, *rest = path.strip("/").split("/")
    if first == "admin":
        return f"Administration: {rest[1].replace('_', ' ')}"
    if rest and rest[0] == "organization":
        return "OpenAI's Admin API"
    return {"api": "Ollama's API", "metrics": "Metrics"}.get(first, INFERENCE)


def _operation(verb: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    lines = [
        f"### `{verb.upper()} {path}` {{ #{operation['operationId']} }}",
        "",
        f"{operation.get('summary', '')}.",
        "",
    ]
    rows = [
        (parameter["name"], parameter["in"], parameter.get("schema", {}), parameter.get("description", ""))
        for parameter in operation.get("parameters", [])
    ]
    refused = []
    for content in operation.get("requestBody", {}).get("content", {}).values():
        name = content["schema"].get("$ref", "").rpartition("/")[2]
        for field, kind in schemas.get(name, {}).get("properties", {}).items():
            if kind.get("description") == REFUSED:
                refused.append(field)
            else:
                rows.append((field, "body", kind, kind.get("description", "")))
    if rows:
        lines += ["| name | in | type | |", "|---|---|---|---|"]
        lines += [f"| `{name}` | {place} | {_cell(_type(kind))} | {_cell(what)} |" for name, place, kind, what in rows]
    if refused:
        lines += ["", f"{REFUSED.removesuffix('.')}: {', '.join(f'`{field}`' for field in refused)}."]
    return "\n".join(lines)


def _type(kind: dict[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "$ref" in kind:
        return re.split(r"[/.]", kind["$ref"])[-1]
    if "anyOf" in kind:
        return " or ".join(_type(each) for each in kind["anyOf"])
    if "enum" in kind:
        return ", ".join(f"`{value}`" for value in kind["enum"])
    if kind.get("type") == "array":
        return f"list of {_type(kind.get('items', {}))}"
    return str(kind.get("type", "any"))


def measured() -> str:
    """Every metric as a page."""
    rows = []
    for one in metrics.reference():
        labels = f"<br>Labels: {', '.join(f'`{label}`' for label in one.labels)}" if one.labels else ""
        rows.append(f"| `{one.name}`<br>{one.kind} | {_cell(one.meaning)}{labels} |")
    return "\n".join(
        ["# Metrics", "", "What `/metrics` has.", "", "| name and kind | what it is |", "|---|---|", *rows]
    )


def failing() -> str:
    """Every failure that a client may hear of as a page: each class says itself what it is of."""
    kinds = sorted(_kinds_of(GatewayError), key=lambda kind: (kind.status, str(kind.code), kind.type))
    usual = [
        f"| {kind.status} | {_code(kind)} | `{kind.type}` | {_failure(kind)} |"
        for kind in kinds
        if not issubclass(kind, Problem)
    ]
    problems = [
        f"| {kind.status} | `urn:penstock:problem:{kind.code}` | {_failure(kind)} |"
        for kind in kinds
        if issubclass(kind, Problem) and kind is not Problem
    ]
    return "\n\n".join(
        [
            "# Errors",
            "Under `/v1` a failure is OpenAI's error object: `message`, `type`, `code`, and `param` where one is at"
            " fault. Anthropic's Messages and Ollama's endpoints tell the same in their own shapes. OpenAI's packages"
            " try 408, 409, 429 and everything from 500 on again by themselves, after `retry-after-ms`; where that is"
            " in vain `x-should-retry: false` keeps them from it. A stream that has begun ends with the failure as an"
            " event.",
            "\n".join(["| status | `code` | `type` | what it is |", "|---|---|---|---|", *usual]),
            "`/admin/v1` answers with problem details (RFC 9457), whose `type` is made of the code, and which name the"
            " fields that are wrong. Besides those above it says:",
            "\n".join(["| status | `type` | what it is |", "|---|---|---|", *problems]),
        ]
    )


def _kinds_of(kind: type[GatewayError]) -> Iterator[type[GatewayError]]:
    for one in kind.__subclasses__():
        yield one
        yield from _kinds_of(one)


def _code(kind: type[GatewayError]) -> str:
    return f"`{kind.code}`" if kind.code else "none, or its own"


def _failure(kind: type[GatewayError]) -> str:
    what = " ".join((kind.__doc__ or "").split()).replace("``", "`").partition(". ")[0].removesuffix(".")
    again = f" (`x-should-retry: {str(kind.should_retry).lower()}`)" if kind.should_retry is not None else ""
    return f"{_cell(what)}{again}"
