"""Floor 3. What Alembic runs: the steps, on the connection and in the transaction that it is given."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], version_table="schema_revision")
with context.begin_transaction():
    context.run_migrations()
