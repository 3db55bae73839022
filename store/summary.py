"""The summary: promises kept, speed, quality of prediction, what was refused, what was lost.

Owns the aggregate queries and the meaning of their numbers. Must not write or open a connection.

Percentiles are exact nearest-rank values, taken by the database itself, so that no table is read
into memory. A promised request is one with at least one target; attainment is over promised
requests that were OFFERED: a rejected, failed or abandoned one counts as missed unless its row says
otherwise. Best-effort requests have no promise to keep.
"""

from __future__ import annotations

import math
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Table, and_, case, func, or_, select

from store import tables
from store.records import EventKind

Summary = dict[str, Any]
_PERCENTILES = (("p50", 0.50), ("p90", 0.90), ("p99", 0.99))
_STEP, _REQUEST, _EVENT = tables.step.c, tables.request.c, tables.event.c
_Conditions = list[ColumnElement[bool]]


def summarise(
    connection: Connection, since: int | None, until: int | None, run_id: str | None
) -> Summary:
    """Return the summary of requests that arrived and steps that ran in `since <= t < until`."""
    of_requests = _within(tables.request, _REQUEST.arrived_at, since, until, run_id)
    of_steps = _within(tables.step, _STEP.at, since, until, run_id)
    of_events = _within(tables.event, _EVENT.at, since, until, run_id)
    duration_s = _duration_s(connection, since, until, of_requests, of_steps)
    return {
        "since": since,
        "until": until,
        "run_id": run_id,
        "duration_s": duration_s,
        "requests": _requests(connection, of_requests, duration_s),
        "admissions": _admissions(connection, of_requests),
        "steps": _steps(connection, of_steps, duration_s),
        "prediction": _prediction(connection, of_steps),
        "losses": _losses(connection, of_events),
    }


def _within(
    table: Table, at: Column[Any], since: int | None, until: int | None, run_id: str | None
) -> _Conditions:
    conditions: _Conditions = []
    if since is not None:
        conditions.append(at >= since)
    if until is not None:
        conditions.append(at < until)
    if run_id is not None:
        conditions.append(table.c.run_id == run_id)
    return conditions


def _duration_s(
    connection: Connection,
    since: int | None,
    until: int | None,
    of_requests: _Conditions,
    of_steps: _Conditions,
) -> float:
    """Return the seconds that rates refer to: the span, or from first to last sign of life."""
    spans = [
        select(func.min(_REQUEST.arrived_at), func.max(_REQUEST.ended_at)).where(*of_requests),
        select(func.min(_STEP.at), func.max(_STEP.at)).where(*of_steps),
    ]
    found = [connection.execute(query).one() for query in spans]
    starts = [first for first, _ in found if first is not None]
    ends = [last for _, last in found if last is not None]
    start = since if since is not None else min(starts, default=0)
    end = until if until is not None else max(ends, default=start)
    return max(0.0, (end - start) / 1000)


def _requests(connection: Connection, where: _Conditions, duration_s: float) -> Summary:
    is_promised = or_(
        _REQUEST.ttft_target_s.is_not(None),
        _REQUEST.tpot_target_s.is_not(None),
        _REQUEST.e2e_target_s.is_not(None),
    )

    def count(condition: ColumnElement[bool]) -> ColumnElement[int]:
        return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)

    columns = [
        func.count().label("num_offered"),
        count(is_promised).label("num_promised"),
        count(and_(is_promised, _REQUEST.attained.is_(True))).label("num_attained"),
        count(_REQUEST.decision == "reject").label("num_rejected"),
        count(_REQUEST.is_degraded.is_(True)).label("num_degraded"),
        count(_REQUEST.finish_reason == "cancelled").label("num_cancelled"),
        count(_REQUEST.finish_reason == "error").label("num_failed"),
        count(_REQUEST.is_ttft_met.is_(False)).label("num_ttft_missed"),
        count(_REQUEST.is_tpot_met.is_(False)).label("num_tpot_missed"),
        count(_REQUEST.is_e2e_met.is_(False)).label("num_e2e_missed"),
        func.coalesce(func.sum(_REQUEST.num_prompt_tokens), 0).label("num_prompt_tokens"),
        func.coalesce(func.sum(_REQUEST.num_output_tokens), 0).label("num_output_tokens"),
        func.max(_REQUEST.longest_gap_s).label("longest_gap_s"),
    ]

    def finish(row: Any, conditions: _Conditions) -> Summary:
        # PostgreSQL sums integers as Decimal.
        numbers = {
            name: int(value) if name.startswith("num_") else value
            for name, value in row._mapping.items()
            if name != "slo_class"
        }
        promised, attained = numbers["num_promised"], numbers["num_attained"]
        numbers["attainment"] = attained / promised if promised else None
        numbers["goodput_per_s"] = attained / duration_s if duration_s > 0 else None
        numbers["ttft_s"] = _percentiles(connection, _REQUEST.ttft_s, conditions)
        numbers["tpot_s"] = _percentiles(connection, _REQUEST.tpot_s, conditions)
        return numbers

    total = finish(connection.execute(select(*columns).where(*where)).one(), where)
    by_class = connection.execute(
        select(_REQUEST.slo_class, *columns)
        .where(*where)
        .group_by(_REQUEST.slo_class)
        .order_by(_REQUEST.slo_class)
    ).all()
    total["by_class"] = [
        {
            "slo_class": row.slo_class,
            **finish(row, [*where, _REQUEST.slo_class == row.slo_class]),
        }
        for row in by_class
    ]
    return total


def _admissions(connection: Connection, where: _Conditions) -> list[Summary]:
    number = func.count()
    rows = connection.execute(
        select(_REQUEST.decision, _REQUEST.reason, number)
        .where(*where)
        .group_by(_REQUEST.decision, _REQUEST.reason)
        .order_by(number.desc(), _REQUEST.decision, _REQUEST.reason)
    ).all()
    return [
        {"decision": decision, "reason": reason, "num_requests": num}
        for decision, reason, num in rows
    ]


def _steps(connection: Connection, where: _Conditions, duration_s: float) -> Summary:
    row = connection.execute(
        select(
            func.count(),
            func.coalesce(func.sum(_STEP.prefill_tokens), 0),
            func.coalesce(func.sum(_STEP.decode_requests), 0),
            func.coalesce(func.sum(_STEP.num_emitted_tokens), 0),
            func.sum(_STEP.planner_s),
            func.sum(_STEP.duration_s),
        ).where(*where)
    ).one()
    prefill, decode, emitted = int(row[1]), int(row[2]), int(row[3])
    by_constraint = connection.execute(
        select(_STEP.binding_constraint, func.count())
        .where(*where, _STEP.binding_constraint.is_not(None))
        .group_by(_STEP.binding_constraint)
        .order_by(func.count().desc(), _STEP.binding_constraint)
    ).all()
    return {
        "num_steps": row[0],
        "num_prefill_tokens": prefill,
        "num_decode_tokens": decode,
        "num_emitted_tokens": emitted,
        "computed_tokens_per_s": (prefill + decode) / duration_s if duration_s > 0 else None,
        "emitted_tokens_per_s": emitted / duration_s if duration_s > 0 else None,
        "duration_s": _percentiles(connection, _STEP.duration_s, where),
        "planner_s": _percentiles(connection, _STEP.planner_s, where),
        "planner_share": row[4] / row[5] if row[5] else None,
        "binding_constraints": [
            {"binding_constraint": name, "num_steps": number} for name, number in by_constraint
        ],
    }


def _prediction(connection: Connection, where: _Conditions) -> Summary:
    """Return MAPE of the mean and coverage of the upper bound, over predicted steps."""
    predicted = [
        *where,
        _STEP.predicted_mean_s.is_not(None),
        _STEP.failure.is_(None),
        # One forward was predicted: neither a search for a failure nor KV on the move, or tried.
        func.coalesce(_STEP.num_retries, 0) == 0,
        func.coalesce(_STEP.num_swapped_blocks, 0) == 0,
        func.coalesce(_STEP.num_failed_swaps, 0) == 0,
        _STEP.duration_s > 0,
    ]
    regime = case(
        (_STEP.prefill_tokens == 0, "decode_only"),
        (_STEP.decode_requests == 0, "prefill_only"),
        else_="mixed",
    )
    # One subquery for both: PostgreSQL cannot see that two CASEs with parameters are the same one.
    steps = (
        select(
            regime.label("regime"),
            _STEP.duration_s,
            _STEP.predicted_upper_s,
            (func.abs(_STEP.predicted_mean_s - _STEP.duration_s) / _STEP.duration_s).label("error"),
        )
        .where(*predicted)
        .subquery()
    )
    # A step without an upper bound is neither covered nor missed.
    is_covered = case(
        (steps.c.predicted_upper_s.is_(None), None),
        (steps.c.duration_s <= steps.c.predicted_upper_s, 1.0),
        else_=0.0,
    )
    columns = (
        func.count().label("num_steps"),
        func.avg(steps.c.error).label("mape"),
        func.avg(is_covered).label("coverage"),
    )

    def finish(row: Any) -> Summary:
        return {
            "num_steps": row.num_steps,
            "mape": None if row.mape is None else float(row.mape),
            "coverage": None if row.coverage is None else float(row.coverage),
        }

    total = finish(connection.execute(select(*columns).select_from(steps)).one())
    rows = connection.execute(
        select(steps.c.regime, *columns).group_by(steps.c.regime).order_by(steps.c.regime)
    ).all()
    total["regimes"] = [{"regime": row.regime, **finish(row)} for row in rows]
    return total


def _losses(connection: Connection, where: _Conditions) -> Summary:
    """Return the telemetry's own holes: rows that loss events tell of, and runs that died."""
    rows = connection.execute(
        select(_EVENT.reason, _EVENT.numbers).where(*where, _EVENT.kind == EventKind.TELEMETRY_LOSS)
    ).all()
    by_reason: dict[str, int] = {}
    for reason, numbers in rows:
        lost = sum(
            value
            for name, value in (numbers or {}).items()
            if name.endswith("_rows") and isinstance(value, int)
        )
        by_reason[reason] = by_reason.get(reason, 0) + lost
    num_lost_runs = connection.scalar(
        select(func.count()).where(*where, _EVENT.kind == EventKind.RUN_LOST)
    )
    return {
        "num_loss_events": len(rows),
        "num_rows_dropped": sum(by_reason.values()),
        "num_rows_dropped_by_reason": by_reason,
        "num_lost_runs": num_lost_runs or 0,
    }


def _percentiles(
    connection: Connection, column: Column[Any], where: _Conditions
) -> dict[str, float | None]:
    """Return nearest-rank percentiles of the values that are there: the ceil(q·n)-th smallest."""
    known = [*where, column.is_not(None)]
    total = connection.scalar(select(func.count()).where(*known).select_from(column.table)) or 0
    values: dict[str, float | None] = {}
    for name, share in _PERCENTILES:
        if total == 0:
            values[name] = None
            continue
        rank = max(1, math.ceil(share * total))
        query = select(column).where(*known).order_by(column).offset(rank - 1).limit(1)
        values[name] = connection.scalar(query)
    return values
