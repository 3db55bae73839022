"""How telemetry looks in a terminal: milliseconds, 120 columns, a request's life as a drawing.

Owns layout. Must not read the database or a clock, or decide what is shown.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from store.text import format_instant

Row = dict[str, Any]
_BAR_WIDTH = 12
_LIFE_WIDTH = 72
# Told apart by their shading where there is no colour.
_PHASES = (
    ("queue", "queue_s", "░", "yellow"),
    ("prefill", "prefill_s", "▒", "cyan"),
    ("decode", "decode_s", "█", "green"),
)


def ms(seconds: float | None, digits: int = 1) -> str:
    """Return seconds as milliseconds without the unit; a dash for None."""
    return "–" if seconds is None else f"{seconds * 1000:.{digits}f}"


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share as a percentage; a dash for None."""
    return "–" if share is None else f"{share * 100:.{digits}f} %"


def _plain(value: Any) -> str:
    return "–" if value is None else str(value)


def _clock(epoch_ms: int) -> str:
    return format_instant(epoch_ms)[11:23]


def _table(*columns: str, title: str | None = None) -> Table:
    """Return a borderless table; a column whose name starts with `<` is left-aligned."""
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title=title,
        title_justify="left",
        show_header=any(name.lstrip("<") for name in columns),
    )
    for name in columns:
        is_left = name.startswith("<")
        table.add_column(name.lstrip("<"), justify="left" if is_left else "right", no_wrap=True)
    return table


def steps_table(rows: Sequence[Row]) -> RenderableType:
    """Return one line per step; times in milliseconds, budgets in prompt tokens."""
    table = _table(
        "step", "<at (UTC)", "chunk", "dec", "actual ms", "predicted", "upper", "N-", "budget",
        "N+", "<bound by", "slack ms", "run/wait/pre", "kv", "<moved",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            str(row["step_no"]),
            _clock(row["at"]),
            str(row["prefill_tokens"]),
            str(row["decode_requests"]),
            _actual(row),
            ms(row["predicted_mean_s"]),
            ms(row["predicted_upper_s"]),
            _plain(row["lower_bound_tokens"]),
            _plain(row["token_budget"]),
            _plain(row["upper_bound_tokens"]),
            _plain(row["binding_constraint"]),
            ms(row["slack_s"]),
            f"{row['num_running']}/{row['num_waiting']}/{row['num_preempted']}",
            percent(row["num_blocks_used"] / max(1, row["num_blocks_total"]), 0),
            _moved(row),
        )
    return table


def _moved(row: Row) -> Text:
    """Return what a step did beside its one forward: blocks swapped (↔), forwards repeated (↻)."""
    marks = (("↔", row["num_swapped_blocks"]), ("↻", row["num_retries"]))
    return Text("".join(f"{mark}{count}" for mark, count in marks if count), style="magenta")


def _actual(row: Row) -> Text:
    """Return the step's milliseconds, red where it failed or broke its upper bound."""
    upper_s = row["predicted_upper_s"]
    is_over = row["failure"] is not None or (upper_s is not None and row["duration_s"] > upper_s)
    return Text(ms(row["duration_s"]), style="red" if is_over else "")


def requests_table(rows: Sequence[Row]) -> RenderableType:
    """Return one line per request; times in milliseconds, cached prompt tokens in brackets."""
    table = _table(
        "<request", "<at (UTC)", "<class", "prompt", "out", "queue", "TTFT", "TPOT", "gap",
        "<outcome", "<kept",
    )  # fmt: skip
    for row in rows:
        outcome = row["finish_reason"] + (" (degraded)" if row["is_degraded"] else "")
        if row["decision"] == "reject":
            outcome += f": {row['reason']}"
        table.add_row(
            row["request_id"],
            _clock(row["arrived_at"])[:8],
            row["slo_class"],
            _prompt(row),
            str(row["num_output_tokens"]),
            ms(row["queue_s"]),
            _against(row["ttft_s"], row["ttft_target_s"]),
            _against(row["tpot_s"], row["tpot_target_s"]),
            ms(row["longest_gap_s"]),
            outcome,
            _kept(row["attained"]),
        )
    return table


def _prompt(row: Row) -> str:
    cached = row["num_cached_tokens"]
    return f"{row['num_prompt_tokens']} ({cached})" if cached else str(row["num_prompt_tokens"])


def _against(value_s: float | None, target_s: float | None) -> Text:
    """Return `value/target` in milliseconds, red where the target was missed."""
    if target_s is None:
        return Text(ms(value_s, 0))
    style = "red" if value_s is not None and value_s > target_s else ""
    return Text(f"{ms(value_s, 0)}/{ms(target_s, 0)}", style=style)


def _kept(attained: bool | None) -> Text:
    if attained is None:
        return Text("–")
    return Text("yes", style="green") if attained else Text("no", style="red")


def events_table(rows: Sequence[Row]) -> RenderableType:
    """Return one line per event."""
    table = _table("<at (UTC)", "<kind", "<reason", "<request", "step")
    table.add_column("numbers", overflow="fold")
    for row in rows:
        table.add_row(
            _clock(row["at"]),
            row["kind"],
            row["reason"],
            _plain(row["request_id"]),
            _plain(row["step_no"]),
            json.dumps(row["numbers"] or {}, ensure_ascii=False),
        )
    return table


def life_of_request(life: Row) -> list[RenderableType]:
    """Return one request's life: what was promised and decided, a bar of its phases, its steps."""
    request, steps = life["request"], life["steps"]
    parts: list[RenderableType] = [
        Text(f"request {life['request_id']} (run {life['run_id']})", style="bold")
    ]
    if request is None:
        parts.append(Text("still running, or its end was not recorded: only its steps are known"))
    else:
        parts.extend((_story(request), _targets(request), _phases(request)))
    parts.append(_life_table(life, steps))
    return parts


def _story(request: Row) -> Text:
    text = Text()
    text.append(
        f"class {request['slo_class']}, arrived {format_instant(request['arrived_at'])};"
        f" prompt {request['num_prompt_tokens']} tokens ({request['num_cached_tokens']} cached),"
        f" output {request['num_output_tokens']} of at most {request['max_tokens']}\n"
    )
    decision = request["decision"] or "no decision"
    text.append(f"decision: {decision}")
    if request["reason"]:
        text.append(f" ({request['reason']})")
    if request["is_degraded"]:
        text.append(", served without its promise")
    if request["predicted_ttft_s"] is not None:
        text.append(f", predicted TTFT {ms(request['predicted_ttft_s'])} ms")
    text.append(f"; end: {request['finish_reason']}")
    if request["failure"]:
        text.append(f" ({request['failure']})", style="red")
    if request["num_preemptions"]:
        text.append(f"; preempted {request['num_preemptions']}×")
    return text


def _targets(request: Row) -> RenderableType:
    table = _table("<promise", "target ms", "actual ms", "<kept")
    for name in ("ttft", "tpot", "e2e"):
        table.add_row(
            name.upper(),
            ms(request[f"{name}_target_s"]),
            ms(request[f"{name}_s"]),
            _kept(request[f"is_{name}_met"]),
        )
    table.add_row("longest gap", "", ms(request["longest_gap_s"]), "")
    table.add_row("tokens on time", "", percent(request["fluidity"]), "")
    return table


def _phases(request: Row) -> Text:
    """Return queue, prefill and decode as one bar to scale."""
    known = [(label, request[name] or 0.0, mark, style) for label, name, mark, style in _PHASES]
    total_s = sum(seconds for _, seconds, _, _ in known)
    text = Text("\n")
    if total_s > 0:
        for _, seconds, mark, style in known:
            text.append(mark * round(_LIFE_WIDTH * seconds / total_s), style=style)
        text.append("\n")
    for label, seconds, mark, style in known:
        text.append(f"{mark} ", style=style)
        text.append(f"{label} {ms(seconds)} ms   ")
    text.append("\n")
    return text


def _life_table(life: Row, steps: Sequence[Row]) -> RenderableType:
    """Return one line per share of a step, with the events between them."""
    table = _table(
        "step", "+ms", "<what", "gap ms", "<", "step ms", "predicted", "upper", "budget", "N-..N+",
        "<bound by", "<beside",
    )  # fmt: skip
    longest_gap_s = max((row["gap_s"] or 0.0 for row in steps), default=0.0)
    request = life["request"]
    if request is not None and request["queue_s"]:
        table.add_row("", "0.0", Text(f"queue for {ms(request['queue_s'])} ms", style="yellow"))
    events = list(life["events"])
    for row in steps:
        while events and _comes_before(events[0], row):
            _add_event(table, events.pop(0))
        table.add_row(
            str(row["step_no"]),
            ms(row["since_arrival_s"]),
            _what(row),
            "" if row["gap_s"] is None else ms(row["gap_s"]),
            _bar(row["gap_s"], longest_gap_s),
            _actual(row),
            ms(row["predicted_mean_s"]),
            ms(row["predicted_upper_s"]),
            _plain(row["token_budget"]),
            f"{_plain(row['lower_bound_tokens'])}..{_plain(row['upper_bound_tokens'])}",
            _plain(row["binding_constraint"]),
            _beside(row),
        )
    for event in events:
        _add_event(table, event)
    return table


def _comes_before(event: Row, step: Row) -> bool:
    if event["step_no"] is not None:
        return bool(event["step_no"] <= step["step_no"])
    return bool(event["at"] <= step["at"])


def _add_event(table: Table, event: Row) -> None:
    method = (event["numbers"] or {}).get("method")
    how = f" ({method})" if method else ""
    text = Text(f"{event['kind']}: {event['reason']}{how}", style="magenta")
    table.add_row(_plain(event["step_no"]), "", text)


def _what(row: Row) -> Text:
    if row["kind"] == "prefill":
        past, chunk = row["num_computed_tokens"], row["num_tokens"]
        text = Text(f"chunk {chunk} ({past}→{past + chunk})", style="cyan")
        if row["token_index"] is not None:
            text.append(f" token {row['token_index'] + 1}", style="green")
        return text
    number = "" if row["token_index"] is None else f" token {row['token_index'] + 1}"
    return Text(f"decode{number}", style="green")


def _bar(value: float | None, longest: float) -> str:
    if not value or longest <= 0:
        return ""
    return "▇" * max(1, round(_BAR_WIDTH * value / longest))


def _beside(row: Row) -> str:
    """Return the other work of the step: prompt tokens and decodes that are not this request's."""
    is_chunk = row["kind"] == "prefill"
    chunk = row["prefill_tokens"] - (row["num_tokens"] if is_chunk else 0)
    decodes = row["decode_requests"] - (0 if is_chunk else 1)
    return f"{chunk}+{decodes}d"


def summary_tables(answer: Row) -> list[RenderableType]:
    """Return the summary as small tables."""
    requests, steps = answer["requests"], answer["steps"]
    head = _table("<", "")
    head.add_row("time covered", f"{answer['duration_s']:.1f} s")
    head.add_row("computed tokens per second", _rate(steps["computed_tokens_per_s"]))
    head.add_row("emitted tokens per second", _rate(steps["emitted_tokens_per_s"]))
    losses = answer["losses"]
    head.add_row("telemetry rows dropped", str(losses["num_rows_dropped"]))
    head.add_row("runs that died", str(losses["num_lost_runs"]))
    promises = _table(
        "<class", "offered", "promised", "kept", "attainment", "goodput/s", "rejected", "cancelled",
        "failed", "TTFT p50/p90/p99 ms", "TPOT p50/p90/p99",
        title="\nPromises (attainment is over offered requests with a target)",
    )  # fmt: skip
    for row in (*requests["by_class"], {"slo_class": "all", **requests}):
        promises.add_row(
            row["slo_class"],
            str(row["num_offered"]),
            str(row["num_promised"]),
            str(row["num_attained"]),
            percent(row["attainment"]),
            "–" if row["goodput_per_s"] is None else f"{row['goodput_per_s']:.3g}",
            str(row["num_rejected"]),
            str(row["num_cancelled"]),
            str(row["num_failed"]),
            _percentiles(row["ttft_s"], 0),
            _percentiles(row["tpot_s"], 0),
        )
    admissions = _table("<decision", "<reason", "requests", title="\nAdmissions")
    for row in answer["admissions"]:
        admissions.add_row(row["decision"] or "none", row["reason"], str(row["num_requests"]))
    tables = [head, promises, admissions, _prediction_table(answer), _steps_summary(steps)]
    if answer["cost_model"] is not None:
        tables.insert(-1, cost_model_table(answer["cost_model"]))
    return tables


def _prediction_table(answer: Row) -> RenderableType:
    table = _table("<regime", "steps", "error (MAPE)", "covered", title="\nStep prediction")
    prediction = answer["prediction"]
    for row in (*prediction["regimes"], {"regime": "all", **prediction}):
        table.add_row(
            row["regime"], str(row["num_steps"]), percent(row["mape"]), percent(row["coverage"])
        )
    return table


def cost_model_table(costs: Row) -> RenderableType:
    """Return what the stored model says of the machine (`runtime.learnt`), or why it cannot."""
    table = _table("<", "", title=f"\nCost model, stored after {costs['num_observed']} steps")
    if costs["problem"] is not None:
        table.add_row("cannot be read", costs["problem"])
        return table
    for name, column in (
        ("an almost empty step, ms", "floor_s"),
        ("one more prompt token, ms", "prefill_token_s"),
        ("one more decode, ms", "decode_request_s"),
        ("one more prompt in a step, ms", "extra_chunk_s"),
    ):
        table.add_row(name, ms(costs[column], 3))
    table.add_row("tokens beyond which throughput is flat", str(costs["knee_tokens"]))
    ratio = costs["mixing_ratio"]
    if ratio is not None:
        verdict = "mixing wins" if ratio < 1.0 else "two steps would be quicker"
        table.add_row("mixed steps over two steps", f"{ratio:.2f} ({verdict})")
    return table


def _steps_summary(steps: Row) -> RenderableType:
    table = _table("<", "", title="\nSteps")
    table.add_row("number", str(steps["num_steps"]))
    table.add_row("step p50/p90/p99 ms", _percentiles(steps["duration_s"], 1))
    table.add_row("planner p50/p90/p99 ms", _percentiles(steps["planner_s"], 3))
    table.add_row("planner's share", percent(steps["planner_share"], 2))
    for row in steps["binding_constraints"]:
        table.add_row(f"bound by {row['binding_constraint']}", str(row["num_steps"]))
    return table


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _percentiles(values: Row, digits: int) -> str:
    return "/".join(ms(values[name], digits) for name in ("p50", "p90", "p99"))
