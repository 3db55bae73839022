"""The tables: SQLAlchemy Core metadata, portable between SQLite and PostgreSQL.

Owns names, types and indices; a change here needs a revision in `alembic/versions`. Must not open a
connection.

No foreign keys: a dropped run or step must not cost the rows that name it, and retention deletes
each table in its own small batches. Columns: `_at` epoch milliseconds UTC, `_s` seconds, `_clock_s`
monotonic seconds that are comparable within one run only.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    MetaData,
    String,
    Table,
    Text,
)

# Its own name, so that a tuning study or another product in the same database can never collide
# with it.
VERSION_TABLE = "paceline_alembic_version"

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

run = Table(
    "run",
    metadata,
    Column("run_id", String(64), primary_key=True),
    Column("replica_id", String(64), nullable=False),
    Column("started_at", BigInteger, nullable=False),
    Column("ended_at", BigInteger),
    Column("end_reason", String(32)),
    Column("model", String(256), nullable=False),
    Column("device", String(128), nullable=False),
    Column("attention_backend", String(64), nullable=False),
    Column("policy", String(64), nullable=False),
    Column("profile", String(128)),
    Column("code_version", String(64), nullable=False),
    Column("settings", JSON(none_as_null=True)),
)

step = Table(
    "step",
    metadata,
    Column("run_id", String(64), primary_key=True),
    Column("step_no", BigInteger, primary_key=True, autoincrement=False),
    Column("at", BigInteger, nullable=False),
    Column("clock_s", Double, nullable=False),
    Column("duration_s", Double, nullable=False),
    Column("planner_s", Double, nullable=False),
    Column("execute_s", Double, nullable=False),
    # The features of the cost model; two more stand at the end.
    Column("prefill_tokens", BigInteger, nullable=False),
    Column("decode_requests", BigInteger, nullable=False),
    Column("decode_context_tokens", BigInteger, nullable=False),
    Column("chunk_past_tokens", BigInteger, nullable=False),
    Column("chunk_squared_tokens", BigInteger, nullable=False),
    Column("num_emitted_tokens", BigInteger, nullable=False),
    Column("num_running", BigInteger, nullable=False),
    Column("num_waiting", BigInteger, nullable=False),
    Column("num_preempted", BigInteger, nullable=False),
    Column("num_blocks_used", BigInteger, nullable=False),
    Column("num_blocks_total", BigInteger, nullable=False),
    # The decision; all empty for a planner that gives no account of itself.
    Column("policy", String(64)),
    Column("token_budget", BigInteger),
    Column("lower_bound_tokens", BigInteger),
    Column("upper_bound_tokens", BigInteger),
    Column("binding_constraint", String(64)),
    Column("tightest_request_id", String(64)),
    Column("slack_s", Double),
    Column("predicted_mean_s", Double),
    Column("predicted_upper_s", Double),
    Column("model_version", BigInteger),
    Column("failure", Text),
    # Since revision 0002; NULL in older rows.
    Column("num_retries", BigInteger),
    Column("num_swapped_blocks", BigInteger),
    Column("num_blocks_cached", BigInteger),
    # Since revision 0003; NULL in older rows.
    Column("num_chunks", BigInteger),
    Column("num_prompt_logits", BigInteger),
    # Since revision 0005; NULL in older rows.
    Column("num_failed_swaps", BigInteger),
)
Index(None, step.c.at, step.c.run_id, step.c.step_no)

step_work = Table(
    "step_work",
    metadata,
    Column("run_id", String(64), primary_key=True),
    Column("step_no", BigInteger, primary_key=True, autoincrement=False),
    Column("request_id", String(64), primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("num_tokens", BigInteger, nullable=False),
    Column("num_computed_tokens", BigInteger, nullable=False),
    Column("token_index", BigInteger),
    Column("token_offset_s", Double),
)
Index(None, step_work.c.request_id, step_work.c.run_id, step_work.c.step_no)

request = Table(
    "request",
    metadata,
    Column("run_id", String(64), primary_key=True),
    Column("request_id", String(64), primary_key=True),
    Column("slo_class", String(64), nullable=False),
    Column("priority", BigInteger, nullable=False),
    Column("ttft_target_s", Double),
    Column("tpot_target_s", Double),
    Column("e2e_target_s", Double),
    Column("num_prompt_tokens", BigInteger, nullable=False),
    Column("num_output_tokens", BigInteger, nullable=False),
    Column("num_cached_tokens", BigInteger, nullable=False),
    Column("max_tokens", BigInteger, nullable=False),
    Column("arrived_at", BigInteger, nullable=False),
    Column("arrived_clock_s", Double, nullable=False),
    Column("admitted_at", BigInteger),
    Column("first_token_at", BigInteger),
    Column("ended_at", BigInteger, nullable=False),
    Column("queue_s", Double),
    Column("prefill_s", Double),
    Column("decode_s", Double),
    Column("ttft_s", Double),
    Column("tpot_s", Double),
    Column("e2e_s", Double),
    Column("longest_gap_s", Double),
    Column("fluidity", Double),
    Column("num_preemptions", BigInteger, nullable=False),
    Column("decision", String(16), nullable=False),
    Column("reason", String(64), nullable=False),
    Column("is_degraded", Boolean, nullable=False),
    Column("predicted_ttft_s", Double),
    Column("finish_reason", String(16), nullable=False),
    Column("failure", Text),
    Column("is_ttft_met", Boolean),
    Column("is_tpot_met", Boolean),
    Column("is_e2e_met", Boolean),
    Column("attained", Boolean),
)
Index(None, request.c.request_id)
Index(None, request.c.arrived_at, request.c.run_id, request.c.request_id)
Index(None, request.c.slo_class, request.c.arrived_at)

model_snapshot = Table(
    "model_snapshot",
    metadata,
    Column("run_id", String(64), primary_key=True),
    # The key in one line of JSON, hashed: model names have no length that an index could rely on.
    Column("key_hash", String(64), primary_key=True),
    Column("at", BigInteger, nullable=False),
    Column("learner", String(64), nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("num_observed", BigInteger, nullable=False),
    Column("mape", Double),
    Column("coverage", Double),
    Column("key", JSON(none_as_null=True), nullable=False),
    Column("document", JSON(none_as_null=True), nullable=False),
)
Index(None, model_snapshot.c.key_hash, model_snapshot.c.at)

event = Table(
    "event",
    metadata,
    Column("run_id", String(64), primary_key=True),
    Column("event_no", BigInteger, primary_key=True, autoincrement=False),
    Column("at", BigInteger, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("reason", String(64), nullable=False),
    Column("request_id", String(64)),
    Column("step_no", BigInteger),
    Column("numbers", JSON(none_as_null=True)),
)
Index(None, event.c.at, event.c.run_id, event.c.event_no)
Index(None, event.c.kind, event.c.at)
Index(None, event.c.request_id)

profile = Table(
    "profile",
    metadata,
    Column("name", String(128), primary_key=True),
    Column("created_at", BigInteger, nullable=False),
    # Whom it was tuned for; NULL = nobody in particular, and no server takes it.
    Column("model", String(256)),
    Column("device", String(128)),
    Column("verdict", String(16), nullable=False),
    # At most one active profile per model and device.
    Column("is_active", Boolean, nullable=False),
    Column("study", String(256)),
    Column("document", JSON(none_as_null=True), nullable=False),
)
Index(None, profile.c.model, profile.c.is_active)

tune_trial = Table(
    "tune_trial",
    metadata,
    Column("study", String(256), primary_key=True),
    Column("trial_no", BigInteger, primary_key=True, autoincrement=False),
    Column("at", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),
    Column("score", Double),
    Column("reason", Text),
    Column("settings", JSON(none_as_null=True), nullable=False),
    Column("measures", JSON(none_as_null=True), nullable=False),
)
