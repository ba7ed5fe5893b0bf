"""Many teams behind one door: organizations, service accounts, what a key may do, policies, and who changed what.

Tenants and keys are made anew, since SQLite adds no column that must have a value. Tenants that were there before come
into an organization and have the policy "default", of which the next start writes the first version.
"""

import time

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "changes",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.CheckConstraint("id = 1", name="changes_is_one_row"),
    )
    op.execute("INSERT INTO changes (id, revision) VALUES (1, 1)")
    op.create_table(
        "organizations",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False, unique=True),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False, index=True),
    )
    op.create_table(
        "policy_heads",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("current_version", sa.BigInteger, nullable=False),
        sa.Column("deleted_at", sa.BigInteger),
        sa.Column("revision", sa.BigInteger, nullable=False, index=True),
    )
    op.create_table(
        "policies",
        sa.Column("name", sa.Text, sa.ForeignKey("policy_heads.name"), primary_key=True),
        sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("created_by", sa.Text, nullable=False),
        sa.Column("note", sa.Text, nullable=False),
    )
    tenants_and_keys()
    op.create_table(
        "audit_log",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("actor_key_id", sa.Text, nullable=False),
        sa.Column("actor_name", sa.Text, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("object_kind", sa.Text, nullable=False),
        sa.Column("object_id", sa.Text, nullable=False, index=True),
        sa.Column("before", sa.Text),
        sa.Column("after", sa.Text),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("address", sa.Text, nullable=False),
    )
    op.create_table(
        "idempotency",
        sa.Column("key_id", sa.Text, primary_key=True),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("body_hash", sa.LargeBinary, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("response", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False, index=True),
    )


def tenants_and_keys() -> None:
    for table in ("tenants", "keys"):
        op.execute(f"CREATE TABLE old_{table} AS SELECT * FROM {table}")
    op.drop_table("keys")
    op.drop_table("tenants")
    op.create_table(
        "tenants",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("organization_id", sa.Text, sa.ForeignKey("organizations.id"), nullable=False, index=True),
        sa.Column("name", sa.Text, nullable=False, unique=True),
        sa.Column("policy", sa.Text, sa.ForeignKey("policy_heads.name"), nullable=False, index=True),
        sa.Column("metadata", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("disabled_at", sa.BigInteger),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False, index=True),
    )
    op.create_table(
        "service_accounts",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False, index=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("deleted_at", sa.BigInteger),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False, index=True),
        sa.CheckConstraint("role IN ('owner', 'member')", name="service_accounts_have_a_role"),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), index=True),
        sa.Column("service_account_id", sa.Text, sa.ForeignKey("service_accounts.id"), index=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("role", sa.Text),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("hash", sa.LargeBinary, nullable=False, unique=True),
        sa.Column("prefix", sa.Text, nullable=False),
        sa.Column("last_four", sa.Text, nullable=False),
        sa.Column("scopes", sa.Text),
        sa.Column("networks", sa.Text),
        sa.Column("narrowing", sa.Text),
        sa.Column("rotated_from", sa.Text),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger),
        sa.Column("revoked_at", sa.BigInteger),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False, index=True),
        sa.CheckConstraint(
            "kind = 'admin' AND tenant_id IS NULL AND role IN ('owner', 'operator', 'billing_reader')"
            " OR kind = 'api' AND tenant_id IS NOT NULL AND role IS NULL",
            name="keys_have_their_kind",
        ),
    )
    if op.get_bind().execute(sa.text("SELECT 1 FROM old_tenants LIMIT 1")).first() is not None:
        carry_over()
    for table in ("keys", "tenants"):
        op.drop_table(f"old_{table}")


def carry_over() -> None:
    organization = {"id": f"org_{time.time_ns() // 1_000_000:011x}", "created_at": int(time.time())}
    op.get_bind().execute(
        sa.text(
            "INSERT INTO organizations (id, name, created_at, version, revision)"
            " VALUES (:id, 'default', :created_at, 1, 1)"
        ),
        organization,
    )
    op.execute("INSERT INTO policy_heads (name, current_version, revision) VALUES ('default', 0, 1)")
    op.execute(
        "INSERT INTO tenants"
        " (id, organization_id, name, policy, metadata, created_at, disabled_at, version, revision)"
        " SELECT old_tenants.id, organizations.id, old_tenants.name, 'default', '{}', old_tenants.created_at,"
        " old_tenants.disabled_at, 1, 1 FROM old_tenants, organizations"
    )
    op.execute(
        "INSERT INTO keys (id, tenant_id, kind, role, name, hash, prefix, last_four, created_at, revoked_at,"
        " version, revision)"
        " SELECT id, tenant_id, kind, CASE kind WHEN 'admin' THEN 'owner' END, name, hash, prefix, last_four,"
        " created_at, revoked_at, 1, 1 FROM old_keys"
    )
