"""OpenAI's own client administers the house: projects, their keys and service accounts, limits, admin keys, the log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from gateway.store import tenants
from policies.policy import Limits
from tests import official
from tests.builders import PATIENCE_S
from tests.gateway.conftest import ADMIN_KEY, KEY, Front, OpenFront
from tests.residents import add_key, change


@pytest.fixture
async def front(open_front: OpenFront) -> AsyncIterator[Front]:
    async with open_front() as front:
        yield front


@contextlib.asynccontextmanager
async def administering(front: Front, key: str = ADMIN_KEY, **options: Any) -> AsyncIterator[Any]:
    client = official.Client(
        base_url=f"{front.url}/v1", api_key="none", admin_api_key=key, max_retries=0, timeout=PATIENCE_S, **options
    )
    async with client:
        yield client.admin.organization


@pytest.fixture
async def organization(front: Front) -> AsyncIterator[Any]:
    """``client.admin.organization``."""
    async with administering(front) as organization:
        yield organization


async def opens(front: Front, key: str) -> int:
    async with front.http.get(f"{front.url}/v1/models", headers={"authorization": f"Bearer {key}"}) as answer:
        return answer.status


async def everything(listing: Any) -> list[Any]:
    """All pages of it."""
    return [item async for item in listing]


async def test_a_project_is_made_renamed_and_archived(front, organization):
    made = await organization.projects.create(name="blue")
    assert (made.object, made.name, made.status, made.archived_at) == ("organization.project", "blue", "active", None)
    assert abs(made.created_at - time.time()) < 60
    assert await organization.projects.retrieve(made.id) == made
    renamed = await organization.projects.update(made.id, name="navy")
    assert (renamed.id, renamed.name) == (made.id, "navy")
    key = (await organization.projects.service_accounts.create(made.id, name="robot")).api_key.value
    assert await opens(front, key) == 200
    archived = await organization.projects.archive(made.id)
    assert archived.status == "archived"
    assert archived.archived_at >= made.created_at
    assert await opens(front, key) == 401
    assert [project.name for project in await everything(organization.projects.list())] == ["default"]
    both = await everything(organization.projects.list(include_archived=True))
    assert [project.name for project in both] == ["default", "navy"]
    for change_it in (
        organization.projects.update(made.id, name="other"),
        organization.projects.service_accounts.create(made.id, name="robot"),
        organization.projects.rate_limits.update_rate_limit("rl-demo", project_id=made.id, max_tokens_per_1_minute=1),
    ):
        with pytest.raises(openai.ConflictError, match="archived"):
            await change_it


async def test_lists_come_in_pages_without_gaps_or_repetitions(organization):
    made = [(await organization.projects.create(name=f"project {number}")).id for number in range(7)]
    first = await organization.projects.list(limit=3)
    assert (first.has_more, len(first.data), first.last_id) == (True, 3, first.data[-1].id)
    listed = [project.id for project in await everything(organization.projects.list(limit=3))]
    assert listed[1:] == made
    assert len(listed) == 8
    keys = [(await organization.admin_api_keys.create(name=f"key {number}")).id for number in range(5)]
    for order in ("asc", "desc"):
        ids = [key.id for key in await everything(organization.admin_api_keys.list(limit=2, order=order))]
        assert (ids if order == "asc" else ids[::-1])[1:] == keys
    log = await everything(organization.audit_logs.list(limit=4))
    assert [event.effective_at for event in log] == sorted((event.effective_at for event in log), reverse=True)
    assert len({event.id for event in log}) == len(log) == 12
    back = await organization.audit_logs.list(limit=4, before=log[8].id)
    assert [event.id for event in back.data] == [event.id for event in log[4:8]]


async def test_a_service_account_has_keys_until_it_is_deleted(front, organization):
    project = await organization.projects.create(name="blue")
    accounts, api_keys = organization.projects.service_accounts, organization.projects.api_keys
    made = await accounts.create(project.id, name="robot", expires_in_seconds=3600)
    assert (made.object, made.name, made.role) == ("organization.project.service_account", "robot", "member")
    assert made.api_key.object == "organization.project.service_account.api_key"
    assert made.api_key.expires_at - made.api_key.created_at == 3600
    assert await opens(front, made.api_key.value) == 200

    only = await accounts.create(project.id, name="bare", create_service_account_only=True)
    assert only.api_key is None
    further = await accounts.api_keys.create(only.id, project_id=project.id, name="second", scopes=["api.model.read"])
    assert (further.name, further.expires_at) == ("second", None)
    assert await opens(front, further.value) == 200

    changed = await accounts.update(made.id, project_id=project.id, name="machine", role="owner")
    assert (changed.id, changed.name, changed.role) == (made.id, "machine", "owner")
    assert await accounts.retrieve(made.id, project_id=project.id) == changed
    assert [account.name for account in await everything(accounts.list(project.id))] == ["machine", "bare"]

    keys = await everything(api_keys.list(project.id))
    assert [(key.name, key.owner.service_account.name) for key in keys] == [
        ("Secret Key", "machine"),
        ("second", "bare"),
    ]
    assert {key.owner.type for key in keys} == {"service_account"}

    gone = await accounts.delete(made.id, project_id=project.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "organization.project.service_account.deleted")
    assert await opens(front, made.api_key.value) == 401
    with pytest.raises(openai.NotFoundError):
        await accounts.retrieve(made.id, project_id=project.id)
    assert [key.id for key in await everything(api_keys.list(project.id))] == [further.id]


async def test_a_key_is_shown_once_restricted_and_revoked(front, organization):
    project = await organization.projects.create(name="blue")
    api_keys = organization.projects.api_keys
    made = (await organization.projects.service_accounts.create(project.id, name="robot")).api_key
    read = await api_keys.retrieve(made.id, project_id=project.id)
    assert read.object == "organization.project.api_key"
    assert read.redacted_value == f"sk-penstock-...{made.value[-4:]}"
    assert made.value not in read.to_json()
    assert read.owner_project_access == "active"
    assert await everything(api_keys.list(project.id, owner_project_access="inactive")) == []

    limited = await api_keys.update(made.id, project_id=project.id, scopes=["model.request"], expires_in_seconds=60)
    assert abs(limited.expires_at - time.time() - 60) < 30
    assert await opens(front, made.value) == 403
    await api_keys.update(made.id, project_id=project.id, scopes=[])
    assert await opens(front, made.value) == 200

    gone = await api_keys.delete(made.id, project_id=project.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "organization.project.api_key.deleted")
    assert await opens(front, made.value) == 401
    for ask in (api_keys.retrieve, api_keys.delete):
        with pytest.raises(openai.NotFoundError):
            await ask(made.id, project_id=project.id)


async def test_a_key_without_a_service_account_belongs_to_the_project(front, organization):
    (default,) = await everything(organization.projects.list())
    (key,) = await everything(organization.projects.api_keys.list(default.id))
    assert (key.name, key.owner.type, key.owner.service_account) == ("bootstrap", None, None)
    read = await organization.projects.api_keys.retrieve(key.id, project_id=default.id)
    assert read == key


async def test_what_belongs_to_another_project_is_not_there(organization):
    blue, red = [await organization.projects.create(name=name) for name in ("blue", "red")]
    made = await organization.projects.service_accounts.create(blue.id, name="robot")
    accounts, api_keys = organization.projects.service_accounts, organization.projects.api_keys
    for ask in (
        accounts.retrieve(made.id, project_id=red.id),
        accounts.update(made.id, project_id=red.id, name="mine"),
        accounts.delete(made.id, project_id=red.id),
        accounts.api_keys.create(made.id, project_id=red.id),
        api_keys.retrieve(made.api_key.id, project_id=red.id),
        api_keys.update(made.api_key.id, project_id=red.id, scopes=[]),
        api_keys.delete(made.api_key.id, project_id=red.id),
        api_keys.list("ten_nobody"),
    ):
        with pytest.raises(openai.NotFoundError) as refused:
            await ask
        assert (refused.value.code, refused.value.type) == ("not_found", "invalid_request_error")
    assert (await accounts.retrieve(made.id, project_id=blue.id)).name == "robot"


async def test_rate_limits_are_the_projects_own(front, organization):
    blue, red = [await organization.projects.create(name=name) for name in ("blue", "red")]
    rate_limits = organization.projects.rate_limits
    (before,) = await everything(rate_limits.list_rate_limits(blue.id))
    assert (before.id, before.model, before.object) == ("rl-demo", "demo", "project.rate_limit")
    assert before.max_requests_per_1_minute == before.max_tokens_per_1_minute == 10**12

    after = await rate_limits.update_rate_limit("rl-demo", project_id=blue.id, max_requests_per_1_minute=7)
    assert (after.max_requests_per_1_minute, after.max_tokens_per_1_minute) == (7, 10**12)
    after = await rate_limits.update_rate_limit("rl-demo", project_id=blue.id, max_tokens_per_1_minute=900)
    assert await everything(rate_limits.list_rate_limits(blue.id)) == [after]
    assert await everything(rate_limits.list_rate_limits(red.id)) == [before]

    key = (await organization.projects.service_accounts.create(blue.id, name="robot")).api_key.value
    caller = front.gw.auth.caller(key)
    assert (caller.policy_name, caller.policy_version) == (f"project:{blue.id}", 2)
    assert caller.policy.limits_on("demo") == Limits(requests_per_minute=7, tokens_per_minute=900)
    assert front.gw.auth.caller(KEY).policy.limits_on("demo") == Limits()

    with pytest.raises(openai.NotFoundError):
        await rate_limits.update_rate_limit("rl-another", project_id=blue.id, max_tokens_per_1_minute=1)
    red_id = (await organization.projects.retrieve(red.id)).id
    await change(front.gw.store, tenants, red_id, policy=f"project:{blue.id}")
    with pytest.raises(openai.ConflictError, match=red_id):
        await rate_limits.update_rate_limit("rl-demo", project_id=blue.id, max_tokens_per_1_minute=1)


async def test_rate_limits_come_in_pages_whatever_their_models_are_called(front, organization):
    models = ["Qwen/Qwen3-0.6B", "demo", "größer: 8B"]
    body = {"document": {"model_limits": {model: {"requests_per_minute": 7} for model in models}}}
    url, headers = f"{front.url}/admin/v1/policies/default", {"authorization": f"Bearer {ADMIN_KEY}", "if-match": "*"}
    (await front.http.put(url, json=body, headers=headers, raise_for_status=True)).release()
    (project,) = await everything(organization.projects.list())
    rate_limits = organization.projects.rate_limits
    assert [limit.model for limit in await everything(rate_limits.list_rate_limits(project.id, limit=1))] == models
    before = await rate_limits.list_rate_limits(project.id, before="rl-größer: 8B", limit=1)
    assert before.first_id == before.last_id == "rl-demo"


async def test_admin_keys_are_made_by_owners_and_the_last_one_stays(front, organization):
    made = await organization.admin_api_keys.create(name="second", expires_in_seconds=60)
    assert (made.object, made.owner.role) == ("organization.admin_api_key", "owner")
    assert made.value.startswith("sk-penstock-admin-")
    async with administering(front, made.value) as second:
        read = await second.admin_api_keys.retrieve(made.id)
    assert read.redacted_value == f"sk-penstock-admin-...{made.value[-4:]}"
    assert made.value not in read.to_json()
    assert await opens(front, made.value) == 401  # it opens the administration alone
    gone = await organization.admin_api_keys.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "organization.admin_api_key.deleted")
    async with administering(front, made.value) as second:
        with pytest.raises(openai.AuthenticationError):
            await second.projects.list()
    (last,) = await everything(organization.admin_api_keys.list())
    with pytest.raises(openai.ConflictError):
        await organization.admin_api_keys.delete(last.id)


async def test_who_may_do_what(front):
    roles = {role: await add_key(front.gw.store, None, role=role) for role in ("operator", "billing_reader")}
    await front.gw.directory.refresh()
    outcomes = {}
    for who, key in {**roles, "tenant": KEY}.items():
        async with administering(front, key) as organization:
            outcomes[who] = [
                await status(organization.projects.list()),
                await status(organization.projects.create(name=f"by {who}")),
                await status(organization.audit_logs.list()),
                await status(organization.admin_api_keys.list()),
                await status(organization.admin_api_keys.create(name="mine")),
            ]
    assert outcomes == {
        "operator": [200, 200, 200, 403, 403],
        "billing_reader": [200, 403, 403, 403, 403],
        "tenant": [401] * 5,
    }


async def status(asking: Any) -> int:
    try:
        await asking
    except openai.APIStatusError as error:
        return error.status_code
    return 200


async def test_the_audit_log_speaks_openais_words(front, organization):
    blue = await organization.projects.create(name="blue")
    account = await organization.projects.service_accounts.create(blue.id, name="robot")
    rate_limits = organization.projects.rate_limits
    await rate_limits.update_rate_limit("rl-demo", project_id=blue.id, max_tokens_per_1_minute=5)
    await organization.projects.service_accounts.update(account.id, project_id=blue.id, role="owner")
    await organization.projects.api_keys.update(account.api_key.id, project_id=blue.id, scopes=["models"])
    await organization.projects.service_accounts.delete(account.id, project_id=blue.id)
    await organization.projects.update(blue.id, name="navy")
    await organization.projects.archive(blue.id)
    admin = await organization.admin_api_keys.create(name="other")

    log = (await everything(organization.audit_logs.list()))[::-1]
    assert [event.type for event in log] == [
        "project.created",
        "service_account.created",
        "api_key.created",
        "tenant.policy.created",
        "project.updated",
        "rate_limit.updated",
        "service_account.updated",
        "api_key.updated",
        "service_account.deleted",
        "api_key.deleted",
        "project.updated",
        "project.archived",
        "tenant.admin_api_key.created",
    ]
    by_type = {event.type: event for event in log}
    assert by_type["project.created"].project_created.data.name == "blue"
    assert by_type["project.updated"].project_updated.changes_requested.title == "navy"
    assert by_type["project.archived"].project_archived.id == blue.id
    assert by_type["service_account.updated"].service_account_updated.changes_requested.role == "owner"
    assert by_type["api_key.updated"].api_key_updated.changes_requested.scopes == ["models"]
    assert by_type["rate_limit.updated"].rate_limit_updated.changes_requested.max_tokens_per_1_minute == 5
    assert {event.project.id for event in log if event.project} == {blue.id}
    own = front.gw.auth._valid(ADMIN_KEY).id
    assert {(event.actor.type, event.actor.api_key.id) for event in log} == {("api_key", own)}
    for secret in (account.api_key.value, admin.value):
        assert all(secret not in event.to_json() for event in log)

    async def chosen(**query: Any) -> list[str]:
        return [event.type for event in await everything(organization.audit_logs.list(**query))]

    assert await chosen(event_types=["project.created", "project.archived"]) == ["project.archived", "project.created"]
    assert await chosen(event_types=["certificate.created"]) == []
    assert len(await chosen(project_ids=[blue.id])) == 11
    assert await chosen(project_ids=["ten_nobody"]) == []
    assert await chosen(resource_ids=[admin.id]) == ["tenant.admin_api_key.created"]
    assert await chosen(actor_ids=["key_nobody"]) == await chosen(actor_emails=["a@example.org"]) == []
    assert len(await chosen(actor_ids=[own, "key_nobody"])) == len(log)
    now = int(time.time())
    assert await chosen(effective_at={"gt": now + 60}) == await chosen(effective_at={"lte": now - 600}) == []
    assert len(await chosen(effective_at={"gte": now - 600, "lt": now + 60})) == len(log)
    assert await chosen(tenant_only=True) == ["tenant.admin_api_key.created", "tenant.policy.created"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "projects", {}, 400, "name"),
        ("POST", "projects", {"name": ""}, 400, "name"),
        ("POST", "projects", {"name": "x" * 129}, 400, "name"),
        ("POST", "projects", {"name": "a", "unknown": 1}, 400, "unknown"),
        ("POST", "projects", {"name": "a", "geography": "EU"}, 400, "geography"),
        ("POST", "projects", {"name": "default"}, 409, "name"),
        ("POST", "projects", b"{", 400, "body"),
        ("POST", "projects", b'{"name": "a", "name": "b"}', 400, "name"),
        ("GET", "projects?limit=0", None, 400, "limit"),
        ("GET", "projects?limit=101", None, 400, "limit"),
        ("GET", "projects?limit=1&limit=2", None, 400, "limit"),
        ("GET", "projects?what=1", None, 400, "what"),
        ("GET", "audit_logs?effective_at[gt]=soon", None, 400, "effective_at[gt]"),
        ("GET", "audit_logs?project_ids[]=a%20b", None, 400, "project_ids[][0]"),
        ("POST", "projects/{id}", {"name": 7}, 400, "name"),
        ("POST", "projects/nobody", {"name": "a"}, 404, None),
        ("POST", "projects/{id}/service_accounts", {"name": "a", "expires_in_seconds": 0}, 400, "expires_in_seconds"),
        (
            "POST",
            "projects/{id}/service_accounts",
            {"name": "a", "create_service_account_only": True, "expires_in_seconds": 5},
            400,
            "expires_in_seconds",
        ),
        ("POST", "projects/{id}/rate_limits/rl-demo", {"max_tokens_per_1_minute": -1}, 400, "max_tokens_per_1_minute"),
        ("POST", "projects/{id}/rate_limits/rl-demo", {"max_tokens_per_1_minute": 10**13}, 400, None),
        ("POST", "projects/{id}/rate_limits/rl-demo", {"max_requests_per_1_day": 5}, 400, "max_requests_per_1_day"),
        ("POST", "admin_api_keys", {"name": "a", "expires_in_seconds": -5}, 400, "expires_in_seconds"),
        ("GET", "admin_api_keys/nobody", None, 404, None),
        ("GET", "nothing", None, 404, None),
        ("PUT", "projects", {"name": "a"}, 405, None),
    ],
)
async def test_bad_input_is_refused_in_openais_shape_and_changes_nothing(front, method, path, body, status, param):
    async with administering(front) as organization:
        (default,) = await everything(organization.projects.list())
        sent = {"data": body} if isinstance(body, bytes) else {"json": body} if body is not None else {}
        headers = {"authorization": f"Bearer {ADMIN_KEY}", "content-type": "application/json"}
        url = f"{front.url}/v1/organization/{path.replace('{id}', default.id)}"
        async with front.http.request(method, url, headers=headers, **sent) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, set(error)) == (status, {"message", "type", "param", "code"})
        assert answer.content_type == "application/json"
        if param is not None:
            assert error["param"] == param
        assert await everything(organization.audit_logs.list()) == []
        assert len(await everything(organization.projects.list())) == 1


async def test_a_scope_that_nobody_knows_is_named(organization):
    (default,) = await everything(organization.projects.list())
    (key,) = await everything(organization.projects.api_keys.list(default.id))
    with pytest.raises(openai.BadRequestError, match=r"api\.everything") as refused:
        await organization.projects.api_keys.update(key.id, project_id=default.id, scopes=["api.everything"])
    assert refused.value.param == "scopes"


async def test_the_header_of_the_organization_chooses_among_several(front, organization):
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with front.http.post(f"{front.url}/admin/v1/organizations", json={"name": "two"}, headers=headers) as answer:
        other = (await answer.json())["id"]
    with pytest.raises(openai.BadRequestError, match="organization_id"):
        await organization.projects.create(name="whose")
    async with administering(front, organization=other) as two:
        made = await two.projects.create(name="its own")
        assert [project.id for project in await everything(two.projects.list())] == [made.id]
    async with administering(front, organization="org_nobody") as none:
        assert await everything(none.projects.list()) == []
        with pytest.raises(openai.BadRequestError):
            await none.projects.create(name="lost")
