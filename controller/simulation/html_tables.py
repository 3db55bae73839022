"""The report's tables: goodput, the best budgets, all points, and what was simulated.

Owns columns, headers and their words. Must not compute: every number is the report's.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from controller.policy.settings import PolicyConfig
from controller.simulation.causes import (
    CAUSE_WORDS,
    binding_names,
    binding_word,
    miss_names,
)
from controller.simulation.curves import Point, PolicyReport
from controller.simulation.digits import MISSING, millis, plain, share, share_range, whole_millis
from controller.simulation.goodput import shown
from controller.simulation.leaders import budget_of
from controller.simulation.report import LEVELS, Report

_Group = tuple[str, Sequence[str]]


def goodput_table(policies: Iterable[PolicyReport], caption: str) -> str:
    """Return goodput by policy, at each of `LEVELS`."""
    rows = []
    for policy in policies:
        by_level = zip(*policy.goodput_by_seed, strict=True)
        cells = (shown(*pair) for pair in zip(policy.goodput, by_level, strict=True))
        rows.append([policy.policy, *cells])
    return table(caption, [("policy", [f"{level:.0%} kept" for level in LEVELS])], rows)


def best_budget_table(report: Report) -> str:
    """Return the best budget of each family at each load; empty without a choice."""
    loads = sorted({each.load for each in report.best_budgets})
    rates = {each.load: each.rate for each in report.best_budgets}
    rows = []
    for family in dict.fromkeys(each.family for each in report.best_budgets):
        by_load = {each.load: each for each in report.best_budgets if each.family == family}
        rows.append(
            [
                family,
                *(
                    f"{best.policy.rpartition('-')[2]} ({share(best.attainment)})"
                    if (best := by_load.get(load))
                    else MISSING
                    for load in loads
                ),
            ]
        )
    if not rows:
        return ""
    return table(
        "Best budget of those tried, in tokens per step, and the share that it keeps",
        [("family", [f"{plain(rates[load])}/s" for load in loads])],
        rows,
    )


def by_name(policies: Iterable[PolicyReport]) -> list[PolicyReport]:
    """Return policies by family and budget."""
    return sorted(policies, key=lambda each: budget_of(each.policy) or (each.policy, 0))


def promise_table(policies: Sequence[PolicyReport], caption: str) -> str:
    """Return every point: what was kept, how long it took, how unequal it was."""
    points = [point for policy in policies for point in policy.points]
    seeds = ["seeds"] if any(point.num_seeds > 1 for point in points) else []
    groups = [
        ("policy", ["in time", *seeds, "refused", "useful tok/s"]),
        ("TTFT, s", ["P50", "P90", "P99"]),
        ("TPOT, ms", ["P50", "P90", "P99"]),
        ("gap, ms", ["P99", "worst"]),
        ("fairness", ["worst wait, s", "worst slowdown", "Jain"]),
    ]
    has_burst = any(point.num_bursts for point in points)
    if has_burst:
        groups.append(("burst", ["recovery, s"]))

    def cells(point: Point) -> list[str]:
        met = point.attainment
        return [
            share(met.mean),
            *([share_range(met.low, met.high)] if seeds else []),
            *_promise_cells(point),
            *([recovery(point)] if has_burst else []),
        ]

    return _by_load(policies, caption, groups, cells)


def class_table(report: Report, names: Sequence[str]) -> str:
    """Return what became of each class in numbers."""
    groups = [
        ("class", ["rate/s", "policy", "requests", "in time"]),
        ("TTFT, s", ["P50", "P90", "P99"]),
        ("TPOT, ms", ["P50", "P90", "P99"]),
    ]
    rows = [
        [
            name,
            plain(point.rate),
            policy.policy,
            plain(point.class_offered[name]),
            share(point.classes[name]),
            *(
                whole_millis(each)
                for each in (times.ttft_p50_s, times.ttft_p90_s, times.ttft_p99_s)
            ),
            *(millis(each) for each in (times.tpot_p50_s, times.tpot_p90_s, times.tpot_p99_s)),
        ]
        for name in names
        for policy in report.curves
        for point in policy.points
        if (times := point.class_times.get(name)) is not None
    ]
    firsts = [i for i in range(1, len(rows)) if rows[i][0] != rows[i - 1][0]]
    return table("Classes at every load", groups, rows, firsts)


def decile_table(report: Report) -> str:
    """Return attainment by tenth of prompt length in numbers."""
    width = max(len(point.deciles) for policy in report.curves for point in policy.points)

    def cells(point: Point) -> list[str]:
        found = [share(each) for each in point.deciles]
        return found + [MISSING] * (width - len(found))

    return _by_load(
        report.curves,
        "In time, by tenth of prompt length, shortest first",
        [("policy", [f"{index + 1}." for index in range(width)])],
        cells,
    )


def miss_table(policies: Sequence[PolicyReport], caption: str) -> str:
    """Return the share of offered requests that missed a target, by cause."""
    causes = miss_names(point.misses for policy in policies for point in policy.points)

    def cells(point: Point) -> list[str]:
        if point.misses is None:
            return [MISSING] * len(causes)
        return [share(point.misses.get(cause, 0.0)) for cause in causes]

    return _by_load(
        policies, caption, [("policy", [CAUSE_WORDS[cause] for cause in causes])], cells
    )


def binding_table(policies: Sequence[PolicyReport], caption: str) -> str:
    """Return the shares of steps, and of the time within them, by what bound them; empty where no
    policy says.
    """
    points = [point for policy in policies for point in policy.points]
    names = binding_names(point.binding_steps for point in points)
    if not names:
        return ""
    words = [binding_word(name) for name in names]

    def cells(point: Point) -> list[str]:
        return [
            share(shares.get(name, 0.0)) if shares else MISSING
            for shares in (point.binding_steps, point.binding_time)
            for name in names
        ]

    groups = [("policy", []), ("share of steps", words), ("share of their time", words)]
    return _by_load(policies, caption, groups, cells)


def machinery_table(policies: Sequence[PolicyReport], caption: str) -> str:
    """Return every point: what planning took, and how well steps were predicted."""
    groups = [
        ("policy", ["one plan, µs", "of a step"]),
        ("step prediction", ["mean error", "covered by the bound"]),
    ]
    return _by_load(policies, caption, groups, _machinery_cells)


def recovery(point: Point) -> str:
    """Return how a burst was overcome, in words."""
    if not point.num_bursts:
        return MISSING
    if point.burst_recovery_s is None:
        return "never"
    text = plain(point.burst_recovery_s)
    return text + (f" ({point.num_unrecovered} never)" if point.num_unrecovered else "")


def _promise_cells(point: Point) -> list[str]:
    return [
        share(point.refused),
        plain(point.useful_tokens_per_s),
        *(whole_millis(each) for each in (point.ttft_p50_s, point.ttft_p90_s, point.ttft_p99_s)),
        *(millis(each) for each in (point.tpot_p50_s, point.tpot_p90_s, point.tpot_p99_s)),
        millis(point.gap_p99_s),
        millis(point.longest_gap_s),
        whole_millis(point.longest_wait_s),
        MISSING if point.largest_slowdown is None else f"{plain(point.largest_slowdown)}×",
        f"{point.jain_index:.2f}",
    ]


def _machinery_cells(point: Point) -> list[str]:
    return [
        plain(point.planner_us),
        share(point.planner_share) if point.planner_share <= 1 else f"{point.planner_share:.0%}",
        share(point.prediction_mape) if point.prediction_mape <= 1 else ">100%",
        share(point.coverage),
    ]


def _by_load(
    policies: Sequence[PolicyReport],
    caption: str,
    groups: Sequence[_Group],
    cells: Callable[[Point], list[str]],
) -> str:
    rows: list[list[str]] = []
    firsts: list[int] = []
    for load in sorted({point.load for policy in policies for point in policy.points}):
        firsts.append(len(rows))
        rows += [
            [f"{policy.policy} at {plain(point.rate)}/s", *cells(point)]
            for policy in policies
            for point in policy.points
            if point.load == load
        ]
    return table(caption, groups, rows, firsts)


def table(
    caption: str,
    groups: Sequence[_Group],
    rows: Sequence[Sequence[str]],
    firsts: Sequence[int] = (),
) -> str:
    """Return a table; the first group's name heads the first column, which names the rows.

    Further groups get a header of their own above theirs. `firsts` are rows that begin something.
    """
    columns = [name for _, names in groups for name in names]
    heads = []
    if len(groups) > 1:
        spans = [f'<td colspan="{1 + len(groups[0][1])}"></td>']
        spans += [
            f'<th scope="colgroup" colspan="{len(names)}">{html.escape(title)}</th>'
            for title, names in groups[1:]
        ]
        heads.append(f"<tr>{''.join(spans)}</tr>")
    first = f'<th scope="col" class="first">{html.escape(groups[0][0])}</th>'
    rest = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    heads.append(f"<tr>{first}{rest}</tr>")
    first_class = ' class="first"'
    body = "".join(
        f"<tr{first_class if index in firsts and index else ''}>"
        f'<th scope="row">{html.escape(row[0])}</th>'
        f"{''.join(f'<td>{html.escape(cell)}</td>' for cell in row[1:])}</tr>"
        for index, row in enumerate(rows)
    )
    # Whoever has no mouse scrolls with the arrow keys, which needs the focus.
    name = html.escape(caption, quote=True)
    return (
        f'<div class="wide" role="region" aria-label="{name}" tabindex="0"><table>'
        f"<caption>{html.escape(caption)}</caption><thead>{''.join(heads)}</thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _noise(machine: Mapping[str, Any]) -> str:
    if machine.get("recorded"):
        return f"as {len(machine['recorded']['factors']):,} steps of it had, in stretches"
    return share(machine["noise"]) if "noise" in machine else ""


def about_table(report: Report) -> str:
    """Return what was simulated in words, a row per subject that is known."""
    about = report.about
    machine = about["hardware"]
    engine = about.get("engine") or {}
    span_s = about.get("duration_s")
    rows = [
        (
            "workload",
            f"{about['workload']}: {about['num_requests']:,} requests"
            + (f" in {plain(span_s)} s" if span_s else "")
            + f", {plain(about['rate'])}/s at load 1",
        ),
        ("machine", _sentence(machine["name"], machine.get("source"))),
        ("noise of a step", _noise(machine)),
        ("memory", _memory(engine)),
        (
            "most running",
            f"{engine['max_num_seqs']} requests, {engine['max_num_batched_tokens']:,} tokens a step"
            if engine
            else "",
        ),
        ("seeds", ", ".join(str(seed) for seed in about["seeds"])),
        ("cost model", about["learner"]),
        ("SLO planner", _knobs(about.get("planner"))),
        ("clients ask for", _clients(about)),
        *((f"class {each['name']}", _class_words(each)) for each in about.get("classes", ())),
        *(
            (
                f"best {search['family']}",
                f"{search['policy']} at {search['level']:.0%}, of budgets"
                f" {', '.join(search['scores'])}",
            )
            for search in about.get("best_static", ())
        ),
    ]
    body = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td>{html.escape(words)}</td></tr>'
        for name, words in rows
        if words
    )
    return f'<div class="wide"><table class="words"><tbody>{body}</tbody></table></div>'


def _sentence(name: str, source: str | None) -> str:
    return f"{name} ({source})" if source else name


def _memory(engine: dict[str, Any]) -> str:
    if not engine:
        return ""
    tokens = engine["num_blocks"] * engine["block_size"]
    cache = "" if engine.get("is_prefix_cache_enabled") else ", equal beginnings not shared"
    return f"{tokens:,} tokens in blocks of {engine['block_size']}{cache}"


def _clients(about: dict[str, Any]) -> str:
    if "client_max_tokens" not in about:
        return ""
    tokens = about["client_max_tokens"]
    return "exactly what they get" if tokens is None else f"{tokens:,} tokens, whatever they get"


def _knobs(planner: dict[str, Any] | None) -> str:
    if planner is None:
        return ""
    shipped = dataclasses.asdict(PolicyConfig())
    changed = [f"{k} = {v}" for k, v in planner.items() if k in shipped and shipped[k] != v]
    return ", ".join(changed) or "as shipped"


def _class_words(entry: dict[str, Any]) -> str:
    slo = entry["slo"]
    targets = [
        f"{title} {plain(slo[name] * unit)} {unit_name}"
        for name, title, unit, unit_name in (
            ("ttft_s", "TTFT", 1.0, "s"), ("tpot_s", "TPOT", 1e3, "ms"), ("e2e_s", "end", 1.0, "s"),
        )
        if slo.get(name) is not None
    ]  # fmt: skip
    text = ", ".join(targets) or "no targets"
    return f"{text}; weight {entry['weight']:g}; {entry['on_infeasible']} what cannot be met"
