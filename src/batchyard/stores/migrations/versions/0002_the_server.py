"""Floor 3. The schema before it was migrated: Batches, chunks, files and keys, on SQLite."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "batches",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("dialect", sa.String(16), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("in_progress_at", sa.Float),
        sa.Column("finalizing_at", sa.Float),
        sa.Column("cancelling_at", sa.Float),
        sa.Column("ended_at", sa.Float),
        sa.Column("deadline_at", sa.Float),
        sa.Column("input_path", sa.Text, nullable=False),
        sa.Column("input_bytes", sa.BigInteger, nullable=False),
        sa.Column("input_mtime_ns", sa.BigInteger, nullable=False),
        sa.Column("input_sha256", sa.String(64), nullable=False),
        sa.Column("total", sa.BigInteger, nullable=False),
        sa.Column("settings", sa.JSON, nullable=False),
        sa.Column("output_path", sa.Text),
        sa.Column("error_path", sa.Text),
        sa.Column("output_file_id", sa.String(64)),
        sa.Column("error_file_id", sa.String(64)),
        sa.Column("model", sa.Text),
        sa.Column("errors", sa.JSON, nullable=False),
        sa.Column("never_ran", sa.BigInteger, nullable=False),
    )
    op.create_index("batches_of_tenant", "batches", ["tenant", "created_at", "id"])
    op.create_table(
        "files",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float),
    )
    op.create_index("files_of_tenant", "files", ["tenant", "created_at", "id"])
    op.create_table(
        "keys",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False, unique=True),
        sa.Column("hint", sa.String(8), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("revoked_at", sa.Float),
    )
    op.create_table(
        "chunks",
        sa.Column("batch_id", sa.String(64), nullable=False),
        sa.Column("no", sa.Integer, nullable=False),
        sa.Column("state", sa.Integer, nullable=False),
        sa.Column("offset", sa.BigInteger, nullable=False),
        sa.Column("length", sa.BigInteger, nullable=False),
        sa.Column("first_index", sa.BigInteger, nullable=False),
        sa.Column("first_line", sa.BigInteger, nullable=False),
        sa.Column("count", sa.Integer, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("owner", sa.String(64)),
        sa.Column("lease_until", sa.Float),
        sa.Column("succeeded", sa.Integer, nullable=False),
        sa.Column("failed", sa.Integer, nullable=False),
        sa.Column("input_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("segment_bytes", sa.BigInteger, nullable=False),
        sa.Column("done_at", sa.Float),
        sa.PrimaryKeyConstraint("batch_id", "no"),
    )
    for name, state in (("chunks_open", 0), ("chunks_leased", 1)):
        term = sa.text(f"state = {state}")
        op.create_index(name, "chunks", ["batch_id", "no"], sqlite_where=term, postgresql_where=term)
