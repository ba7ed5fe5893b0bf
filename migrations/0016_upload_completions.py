"""What an upload became, and by which completion, so that a client which did not hear of it may ask once more."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.add_column("uploads", sa.Column("file_id", sa.Text))
    op.add_column("uploads", sa.Column("completion", sa.LargeBinary))
