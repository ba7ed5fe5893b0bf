"""The administration's commands as an operator types them, against the real gateway."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from gateway.cli import SUBCOMMANDS, main
from gateway.terminal import tables
from gateway.terminal.options import unix_s
from policies.policy import Policy, Price
from tests.builders import PATIENCE_S
from tests.gateway.conftest import ADMIN_KEY, KEY

PRICE = Price(prompt=Decimal(1), completion=Decimal(2))


class Operator:
    """``result = await operator("tenants", "list")``"""

    def __init__(self, url: str, key: str = ADMIN_KEY, charset: str = "utf-8") -> None:
        self.environ = {"PENSTOCK_URL": url, "PENSTOCK_ADMIN_KEY": key}
        self._runner = CliRunner(charset)

    async def __call__(self, *arguments: object, text: str | None = None, **environ: str) -> Result:
        """Elsewhere than in the gateway's loop, as another process would be."""
        return await asyncio.to_thread(
            self._runner.invoke, main, list(map(str, arguments)), input=text, env={**self.environ, **environ}
        )

    async def read(self, *arguments: object) -> Any:
        """What a command prints with --json."""
        result = await self(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)


@pytest.fixture
async def front(open_front):
    async with open_front(policies={"default": Policy(prices={"demo": PRICE})}) as front:
        yield front


@pytest.fixture
def operator(front):
    return Operator(front.url)


async def answered(front) -> None:
    """A request with one token of completion, computed and settled."""
    task = front.chat()
    front.peer.say(await front.peer.submitted(), [5, 3], "stop")
    await task


def written(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


async def test_a_name_that_is_no_text_is_refused_in_a_sentence(operator):
    result = await operator("tenants", "create", "caf\udce9")
    assert result.exit_code == 1
    assert result.stderr == "penstock: the administration is sent UTF-8 text, and this is none\n"


async def test_a_terminal_without_utf8_is_shown_what_it_can_show(front, operator):
    await operator.read("tenants", "create", "café 日本語")
    latin = Operator(front.url, charset="latin-1")
    for command in (("tenants", "list"), ("tenants", "show", "café 日本語")):
        listed = await latin(*command)
        assert (listed.exit_code, "café ???" in listed.stdout) == (0, True), listed
    assert (await Operator(front.url, charset="ascii")("top", "--once")).exit_code == 0


async def test_a_document_is_utf8_whatever_the_locale_has(front, operator, tmp_path):
    document = tmp_path / "gold.json"
    document.write_text('{"models": ["modèle"]}', "utf-8")
    for name, file, given in (("gold", document, None), ("silver", "-", document.read_bytes())):
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "gateway", "policies", "create", name, str(file)],
            input=given,
            capture_output=True,
            env={**os.environ, **operator.environ, "LC_ALL": "C", "PYTHONUTF8": "0"},
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads((await operator("policies", "show", name)).stdout)["models"] == ["modèle"]


async def test_a_narrow_terminal_breaks_neither_ids_nor_numbers(front, operator):
    await answered(front)
    name = "research and development of stories " * 3
    made = await operator.read("tenants", "create", name.strip())
    (request,) = await operator.read("requests")
    for command, words in (
        (("tenants", "list"), (made["id"], "disabled")),
        (("requests",), (request["request_id"], "completion", "standard")),
        (("usage",), ("of it cached", "requests")),
    ):
        shown = await operator(*command, FORCE_COLOR="1", NO_COLOR="1", COLUMNS="80")
        assert [word for word in words if word not in shown.stdout] == []
        assert name.strip() not in shown.stdout  # which is folded


async def test_a_tenant_is_made_changed_and_disabled(operator):
    made = await operator.read("tenants", "create", "blue", "--metadata", "floor=3")
    assert (made["name"], made["policy"], made["metadata"]) == ("blue", "default", {"floor": "3"})

    listed = await operator("tenants", "list")
    assert "blue" in listed.stdout
    assert made["id"] in listed.stdout

    assert (await operator.read("tenants", "update", "blue", "--name", "green"))["name"] == "green"
    assert (await operator.read("tenants", "disable", made["id"]))["disabled_at"] is not None
    assert [one["name"] for one in await operator.read("tenants", "list", "--disabled")] == ["green"]
    assert (await operator.read("tenants", "enable", "green"))["disabled_at"] is None
    nothing = await operator("tenants", "update", "green")
    assert nothing.exit_code == 2
    assert "nothing is to change" in nothing.stderr


async def test_a_key_is_alone_on_standard_output_and_opens_until_it_is_revoked(front, operator):
    await operator("tenants", "create", "blue")
    made = await operator("keys", "create", "--tenant", "blue", "--name", "ci", "--endpoint", "models")
    key = made.stdout.strip()
    assert made.stdout == f"{key}\n"

    async def status() -> int:
        async with front.http.get(f"{front.url}/v1/models", headers={"authorization": f"Bearer {key}"}) as answer:
            return int(answer.status)

    assert await status() == 200
    ((kept),) = await operator.read("keys", "list", "--tenant", "blue")
    assert kept["scopes"] == {"endpoints": ["models"]}
    listed = (await operator("keys", "list")).stdout
    assert key not in listed
    assert " blue " in listed

    again = await operator.read("keys", "rotate", kept["id"], "--overlap", 60)
    assert again["rotated_from"] == kept["id"]
    declined = await operator("keys", "revoke", kept["id"], text="n\n")
    assert (declined.exit_code, await status()) == (1, 200)
    assert (await operator("keys", "revoke", kept["id"], "--yes")).exit_code == 0
    assert await status() == 401


async def test_a_key_is_changed_and_listed_with_what_it_has_spent_of_its_budget(operator):
    asked = ("keys", "create", "--tenant", "default", "--name", "ci", "--endpoint", "models")
    key = (await operator.read(*asked))["id"]
    budget = '{"budget": {"amount": "5", "period": "week"}}'
    changed = await operator.read(
        *("keys", "update", key, "--name", "cd", "--network", "10.0.0.0/8", "--expires", "2100-01-01"),
        *("--endpoint", "models", "--endpoint", "usage", "--narrowing", budget),
    )
    assert (changed["name"], changed["networks"], changed["expires_at"]) == ("cd", ["10.0.0.0/8"], 4_102_444_800)
    assert changed["scopes"] == {"endpoints": ["models", "usage"]}
    assert changed["narrowing"] == {"budget": {"amount": "5", "period": "week"}}
    assert "0.00 USD of 5.00 USD a week" in (await operator("keys", "list")).stdout
    assert "5 a week" in (await operator("keys", "show", key)).stdout
    taken = ("--endpoint", "all", "--network", "anywhere", "--expires", "never", "--narrowing", "{}")
    changed = await operator.read("keys", "update", key, *taken)
    assert [changed[name] for name in ("scopes", "networks", "expires_at", "narrowing")] == [None, [], None, None]
    assert (await operator.read("keys", "update", key, "--name", "ci"))["networks"] == []
    assert "USD" not in (await operator("keys", "list")).stdout
    nothing = await operator("keys", "update", key)
    assert (nothing.exit_code, "nothing is to change" in nothing.stderr) == (2, True)
    assert "is no JSON" in (await operator("keys", "update", key, "--narrowing", "{")).stderr
    wrong = await operator("keys", "update", key, "--narrowing", "[]")
    assert (wrong.exit_code, "narrowing" in wrong.stderr) == (1, True)


async def test_a_key_ends_on_a_day_or_so_long_from_now(operator):
    asked = ("keys", "create", "--tenant", "default", "--name", "ci", "--expires")
    assert (await operator.read(*asked, "2100-01-01"))["expires_at"] == 4_102_444_800
    made = await operator.read(*asked, "90d")
    assert abs(made["expires_at"] - made["created_at"] - 90 * 86_400) <= PATIENCE_S
    assert "nor so long from now as 36h" in (await operator(*asked, "tomorrow")).stderr


async def test_a_policy_is_written_compared_tried_and_rolled_back(front, operator, tmp_path):
    slow = written(tmp_path / "slow.json", {"limits": {"requests_per_minute": 1}, "sla_class": "batch"})
    (toml := tmp_path / "fast.toml").write_bytes(  # as an editor on Windows writes it
        b'\xef\xbb\xbfsla_class = "interactive"\r\n[limits]\r\nrequests_per_minute = 9\r\n'
    )
    assert (
        await operator("policies", "create", "gold", slow, "--note", "at first")
    ).stderr == "gold is at version 1.\n"
    listed = (await operator("policies", "list")).stdout.splitlines()
    assert ["bootstrap" in line for line in listed if line.startswith("gold")] == [True]
    assert ["config.toml" in line for line in listed if line.startswith("default")] == [True]
    (version,) = await operator.read("policies", "versions", "gold")
    assert (version["created_by"][:4], version["created_by_name"]) == ("key_", "bootstrap")
    assert (await operator("policies", "edit", "gold", toml)).exit_code == 0

    compared = (await operator("policies", "diff", "gold")).stdout.splitlines()
    assert '-    "requests_per_minute": 1' in compared
    assert '+    "requests_per_minute": 9' in compared
    assert (await operator("policies", "diff", "gold", "--file", toml)).stdout == ""

    for _ in range(2):
        await answered(front)
    await front.settled(2)
    trial = await operator.read("policies", "try", "default", slow, "--since", "1h")
    before, after = (trial[name]["outcome"]["total"] for name in ("before", "after"))
    assert (before["num_admitted"], after["num_admitted"]) == (2, 1)
    assert "standard: answered" in (await operator("policies", "try", "default", slow)).stdout

    assert (await operator("policies", "rollback", "gold", 1)).exit_code == 0
    assert [one["current"] for one in await operator.read("policies", "versions", "gold")] == [False, False, True]
    assert json.loads((await operator("policies", "show", "gold")).stdout) == json.loads(slow.read_text())
    assert (await operator("policies", "delete", "gold", "--yes")).exit_code == 0
    assert (await operator("policies", "show", "gold")).exit_code == 1


async def test_a_policy_is_edited_in_an_editor_until_it_is_right(operator, tmp_path):
    await operator("policies", "create", "gold", written(tmp_path / "gold.json", {}))
    editor = tmp_path / "editor"
    editor.write_text(
        "#!/bin/sh\n"
        f'if [ -e {tmp_path}/tried ]; then echo \'{{"sla_class": "batch"}}\' > "$1"\n'
        f'else touch {tmp_path}/tried; echo \'{{"sla_klass": 1}}\' > "$1"; fi\n'
    )
    editor.chmod(0o755)
    edited = await operator("policies", "edit", "gold", text="y\n", EDITOR=str(editor))
    assert "sla_klass: there is no such field; did you mean sla_class?" in edited.stderr
    assert json.loads((await operator("policies", "show", "gold")).stdout) == {"sla_class": "batch"}
    unchanged = await operator("policies", "edit", "gold", EDITOR="true")
    assert unchanged.stderr == "Nothing was changed.\n"


async def test_usage_and_requests_say_what_the_ledger_has(front, operator):
    for _ in range(3):
        await answered(front)
    rows = await front.settled(3)
    (line,) = await operator.read("usage", "--by", "tenant,model", "--since", "1h")
    assert line["num_requests"] == 3
    assert line["tenant_name"] == "default"
    for name in ("num_prompt_tokens", "num_completion_tokens", "cost_micros"):
        assert line[name] == sum(row[name] for row in rows)
    by_day = await operator.read("usage", "--by", "day,cache")
    assert sum(one["num_requests"] for one in by_day) == 3
    assert "USD" in (await operator("usage")).stdout

    listed = await operator.read("requests", "--limit", 2)
    assert [one["request_id"] for one in listed] == [row["request_id"] for row in reversed(rows)][:2]
    assert " default " in (await operator("requests", "--limit", 2)).stdout
    one = await operator("requests", rows[0]["request_id"])
    assert f"{rows[0]['num_prompt_tokens']}" in one.stdout
    assert "price_version" in one.stdout


async def test_workers_rest_and_models_are_pinned(operator):
    (worker,) = await operator.read("workers", "list")
    assert (await operator.read("workers", "drain", worker["name"]))["resting"] is True
    assert "ready, drained" in (await operator("workers", "list")).stdout
    assert (await operator.read("workers", "resume", worker["name"]))["resting"] is False
    assert [one["name"] for one in await operator.read("models", "list")] == ["demo"]


async def test_limits_say_what_is_left(front, operator, tmp_path):
    await operator("policies", "create", "few", written(tmp_path / "few.json", {"limits": {"requests_per_minute": 4}}))
    await operator("tenants", "update", "default", "--policy", "few")
    await answered(front)
    told = (await operator("tenants", "limits", "default")).stdout
    assert "requests_per_minute" in told
    assert "75%" in told
    (key,) = await operator.read("keys", "list")
    assert (await operator.read("keys", "limits", key["id"]))["ceilings"][0]["used"] == 1


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["tenants", "show", "nobody"], 1, "There is no tenant nobody."),
        (["tenants", "create", "x\ny"], 1, "name: "),
        (["requests", "req_0"], 1, "The ledger has no request req_0"),
        (["requests", "req_0", "--json"], 1, "The ledger has no request req_0"),
        (["keys", "create", "--tenant", "default", "--name", "x", "--network", "here"], 1, "networks[0]: "),
        (["keys", "create", "--tenant", "default", "--name", "x", "--narrowing", "{"], 2, "is no JSON"),
        (["usage", "--by", "colour"], 2, "there is no 'colour'"),
        (["usage", "--since", "yesterday"], 2, "so long ago as 36h"),
        (["usage", "--since", "20261301"], 2, "so long ago as 36h"),
        (["usage", "--since", "30"], 2, "so long ago as 36h"),
        (["usage", "--since", "1793491200000"], 2, "so long ago as 36h"),
        (["policies", "create", "x", "nowhere.json"], 2, "cannot be read"),
        (["tenants", "create", "x", "--metadata", "floor"], 2, "is not NAME=TEXT"),
        (["tenants", "list", "--admin-key", KEY], 1, "admin"),
        (["tenants", "list", "--url", "http://127.0.0.1:1"], 2, "penstock serve"),
    ],
)
async def test_what_is_wrong_is_a_sentence_and_a_status(operator, arguments, status, said):
    result = await operator(*arguments)
    assert result.exit_code == status
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2026-11-01", 1_793_491_200),
        ("20261101", 1_793_491_200),
        ("2026-11-01T02:00+01:00", 1_793_494_800),
        ("1793491200", 1_793_491_200),
        ("0", 0),
    ],
)
def test_instants_are_days_times_and_seconds(text, at):
    context = click.Context(main)
    assert unix_s(context, main.params[0], text) == at


def test_money_has_as_many_digits_as_it_needs():
    assert tables.amount(1_500_000, "USD") == "1.50 USD"
    assert tables.amount(1_234_567_890, "EUR") == "1,234.56789 EUR"
    assert tables.amount(-1, "USD") == "-0.000001 USD"


def test_what_others_wrote_does_not_command_the_terminal():
    assert tables.printable("a\x1b]0;title\x07b\x9bc\td") == "a]0;titlebc\td"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_complete_every_command(shell):
    script = CliRunner().invoke(main, ["completion", shell])
    assert script.exit_code == 0
    assert "_PENSTOCK_COMPLETE" in script.output
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script.output, text=True, check=True, timeout=30)
    words = {"COMP_WORDS": "penstock ", "COMP_CWORD": "1", "_PENSTOCK_COMPLETE": "bash_complete"}
    completed = CliRunner().invoke(main, [], prog_name="penstock", env=words)
    assert set(SUBCOMMANDS) <= {line.partition(",")[2] for line in completed.output.splitlines()}
