"""Floor 3. The tables: state per Batch and per chunk, not per request.

The same for SQLite and PostgreSQL. Times are Unix seconds. Knows nothing of what a status means:
`service.lifecycle` does. A change here needs a step in `migrations/versions`; a test holds both together.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    text,
)

#: The newest revision in `migrations/versions`, which every database is brought to when it is opened.
REVISION = "0003"

OPEN, LEASED, DONE = 0, 1, 2

metadata = MetaData()

batches = Table(
    "batches",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False, default=""),
    # Through which dialect it came, as its owner sees only those of the dialect that is spoken.
    Column("dialect", String(16), nullable=False, default=""),
    Column("status", String(16), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("in_progress_at", Float),
    Column("finalizing_at", Float),
    Column("cancelling_at", Float),
    Column("ended_at", Float),
    Column("deadline_at", Float),
    # What the input is: where it lies and how to tell that it is still the same.
    Column("input_path", Text, nullable=False),
    Column("input_bytes", BigInteger, nullable=False, default=0),
    Column("input_mtime_ns", BigInteger, nullable=False, default=0),
    Column("input_sha256", String(64), nullable=False, default=""),
    Column("total", BigInteger, nullable=False, default=0),
    # What the Batch was asked to do, as its maker said it; compared when it is resumed.
    Column("settings", JSON, nullable=False),
    # Where its results went, once it has ended.
    Column("output_path", Text),
    Column("error_path", Text),
    # For Batches of a server: the files of its results, the model, and why the input was refused.
    Column("output_file_id", String(64)),
    Column("error_file_id", String(64)),
    Column("model", Text),
    Column("errors", JSON, nullable=False, default=list),
    # Raised by every change that somebody asked for, so that whoever works on it knows to look again.
    Column("revision", Integer, nullable=False, server_default="0"),
    # Who validates it or joins its results: one process at a time.
    Column("owner", String(64)),
    Column("lease_until", Float),
    # Larger goes first; what was asked to change since its creation; why it is paused, if not by wish.
    Column("priority", Integer, nullable=False, server_default="0"),
    Column("amendments", JSON, nullable=False, server_default="[]"),
    Column("held_because", Text),
    Column("canary_passed", Integer, nullable=False, server_default="0"),
    # By which key it was made, and how many prompt tokens it was taken to have when it was registered.
    Column("key_id", String(64)),
    Column("enqueued_tokens", BigInteger, nullable=False, server_default="0"),
)

# Pages of a tenant's Batches, newest first.
Index("batches_of_tenant", batches.c.tenant, batches.c.created_at, batches.c.id)

files = Table(
    "files",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("filename", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
)

Index("files_of_tenant", files.c.tenant, files.c.created_at, files.c.id)

keys = Table(
    "keys",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("name", Text, nullable=False),
    # SHA-256 of the key. Keys are 256 random bits, so no slow hash is needed to keep them safe.
    Column("digest", String(64), nullable=False, unique=True),
    # Its last characters, to tell keys apart.
    Column("hint", String(8), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("revoked_at", Float),
    # What it may do and use, and how much of it; null for anything.
    Column("scopes", JSON),
    Column("models", JSON),
    Column("requests_per_minute", Integer),
    Column("max_batches", Integer),
    Column("max_enqueued_tokens", BigInteger),
)

uploads = Table(
    "uploads",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("status", String(16), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("filename", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    # After how many seconds the file that it becomes expires, and which file that was.
    Column("file_expires_s", Float),
    Column("file_id", String(64)),
)

upload_parts = Table(
    "upload_parts",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("upload_id", String(64), nullable=False, index=True),
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
)

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False, index=True),
    Column("name", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("event_types", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    # It signs, so it must be kept as it is; the old one signs too until its time is over.
    Column("secret", String(128), nullable=False),
    Column("old_secret", String(128)),
    Column("old_secret_until", Float),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("webhook_id", String(64), nullable=False),
    Column("body", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("next_at", Float, nullable=False, index=True),
)

chunks = Table(
    "chunks",
    metadata,
    Column("batch_id", String(64), nullable=False),
    Column("no", Integer, nullable=False),
    Column("state", Integer, nullable=False),
    # The byte range of the input that holds this chunk, and what it starts with.
    Column("offset", BigInteger, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("first_index", BigInteger, nullable=False),
    Column("first_line", BigInteger, nullable=False),
    Column("count", Integer, nullable=False),
    # The fence: raised by each claim, repeated by each commit.
    Column("epoch", Integer, nullable=False, default=0),
    Column("owner", String(64)),
    Column("lease_until", Float),
    # Progress: written by the heartbeat while leased, final once done.
    Column("succeeded", Integer, nullable=False, default=0),
    Column("failed", Integer, nullable=False, default=0),
    Column("input_tokens", BigInteger, nullable=False, default=0),
    Column("output_tokens", BigInteger, nullable=False, default=0),
    Column("cached_tokens", BigInteger, nullable=False, default=0),
    # How many were cancelled or expired before they ran, and what failed, by kind. Once they are joined:
    # where the results begin in the Batch's two files, and which requests took more than one attempt.
    Column("never_ran", Integer, nullable=False, server_default="0"),
    Column("failures", JSON),
    Column("output_offset", BigInteger),
    Column("error_offset", BigInteger),
    Column("attempts", JSON),
    # How much of the segment file of this epoch counts, and the order of commits.
    Column("segment_bytes", BigInteger, nullable=False, default=0),
    Column("done_at", Float),
    PrimaryKeyConstraint("batch_id", "no"),
)

# Single requests that were cancelled: the only rows there are for requests, as they are few.
withdrawn = Table(
    "withdrawn",
    metadata,
    Column("batch_id", String(64), nullable=False),
    Column("no", Integer, nullable=False),
    # 0-based place in the chunk.
    Column("place", Integer, nullable=False),
    PrimaryKeyConstraint("batch_id", "no", "place"),
)

# SQLite uses a partial index only for a query that repeats its exact term, so claims ask for
# `state = 0` and, apart from it, for `state = 1` (a test asserts the query plan).
Index(
    "chunks_open",
    chunks.c.batch_id,
    chunks.c.no,
    sqlite_where=text("state = 0"),
    postgresql_where=text("state = 0"),
)
Index(
    "chunks_leased",
    chunks.c.batch_id,
    chunks.c.no,
    sqlite_where=text("state = 1"),
    postgresql_where=text("state = 1"),
)
