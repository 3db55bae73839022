"""The report as one HTML page that needs nothing else: no script, no font, no network.

Owns the page's order and words. Must not compute: every number is the report's; `html_charts` and
`html_tables` show them.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable

from controller.simulation.digits import plain, share
from controller.simulation.html_charts import (
    attainment_chart,
    class_charts,
    class_names,
    decile_charts,
    drawn_crossovers,
    fairness_charts,
    has_curves,
    load_charts,
    main_classes,
    pareto_charts,
    slo_of,
    tightest_class,
    time_charts,
)
from controller.simulation.html_style import style_sheet
from controller.simulation.html_tables import (
    about_table,
    best_budget_table,
    binding_table,
    by_name,
    class_table,
    decile_table,
    goodput_table,
    machinery_table,
    miss_table,
    promise_table,
    recovery,
)
from controller.simulation.report import Report
from controller.simulation.svg import legend, letter

_SECTIONS = (
    ("kept", "Promises kept"),
    ("times", "First token, next tokens, gaps"),
    ("classes", "Class by class"),
    ("lengths", "Short and long prompts"),
    ("pareto", "First token against next tokens"),
    ("fairness", "Bursts and fairness"),
    ("causes", "What bound steps, and why promises were missed"),
    ("points", "All numbers"),
    ("about", "What was simulated"),
)
_OF_CURVES = ("times", "fairness")
_PROMISES = "Promises and times; waits and slowdowns are the worst seed's"


def render_html(report: Report) -> str:
    """Return the page as text."""
    about = report.about
    title = f"{about['workload']} on {about['hardware']['name']}"
    seeds = len(about["seeds"])
    writers = {
        "kept": _kept, "times": _times, "classes": _classes, "lengths": _lengths,
        "pareto": _pareto, "fairness": _fairness, "causes": _causes, "points": _points,
        "about": _about,
    }  # fmt: skip
    shown = [each for each in _SECTIONS if has_curves(report) or each[0] not in _OF_CURVES]
    links = "".join(f'<li><a href="#{key}">{name}</a></li>' for key, name in shown)
    sections = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{name}</h2>'
        f"{''.join(writers[key](report))}</section>"
        for key, name in shown
    )
    body = (
        f"<header><h1>{html.escape(title)}</h1>"
        f'<p class="about quiet">{_count(about["num_requests"], "request")},'
        f" {plain(about['rate'])}/s at load 1, {_count(seeds, 'seed')}. Simulated: the service's"
        " own loop and planners on virtual time.</p></header>"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav><main>{sections}</main>'
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{style_sheet()}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def _kept(report: Report) -> Iterable[str]:
    yield (
        "<p>Attainment is the share of <em>offered</em> requests that met every target: whoever is"
        " refused was not served in time. Goodput is the highest offered rate up to which every"
        " load keeps the level, interpolated; in brackets the range over seeds, ≥ where every load"
        " keeps it, “below all” where none does.</p>"
    )
    if has_curves(report):
        yield legend(report.shown)
        yield _charts([attainment_chart(report), *load_charts(report)])
        if len(report.about["seeds"]) > 1:
            yield "<p>Bands reach from the lowest to the highest seed.</p>"
        yield from _crossover_list(report)
    else:
        yield "<p>One load only: curves are drawn where <code>--load</code> names several.</p>"
        yield promise_table(report.curves, _PROMISES)
    yield goodput_table(report.curves, "Goodput, offered requests per second")
    yield best_budget_table(report)
    others = [policy for policy in report.policies if policy.policy not in report.shown]
    if others:
        yield _details(
            f"Goodput of {len(others)} more budgets that the search tried",
            goodput_table(by_name(others), "Goodput, offered requests per second"),
        )


def _times(report: Report) -> Iterable[str]:
    yield (
        "<p>Percentiles over the requests that have such a number. The refused have none: a policy"
        " that refuses more shows the times of those whom it kept.</p>"
    )
    yield legend(report.shown)
    yield _charts(time_charts(report))


def _classes(report: Report) -> Iterable[str]:
    names, main = class_names(report), main_classes(report)
    if not has_curves(report):
        yield class_table(report, names)
        return
    yield (
        "<p>Dashed: the target, where it is on the scale. Where P90 stays below both lines, nine of"
        " ten of those who were served had what they were promised.</p>"
    )
    yield legend(report.shown)
    for name in main:
        yield _charts(class_charts(report, name))
    others = [name for name in names if name not in main]
    if others:
        charts = "".join(_charts(class_charts(report, name)) for name in others)
        yield _details(f"{len(others)} more classes with fewer requests", charts)
    yield _details("The same in numbers", class_table(report, names))


def _lengths(report: Report) -> Iterable[str]:
    yield (
        "<p>Requests by prompt length in ten groups of equal size, shortest first. Shedding that"
        " keeps as many requests as possible prefers to refuse the long ones: here it shows.</p>"
    )
    yield legend(report.shown)
    yield _charts(decile_charts(report))
    yield _details("The same in numbers", decile_table(report))


def _pareto(report: Report) -> Iterable[str]:
    # Classes with different targets have different times: mixed, they compare shares, not speed.
    name = tightest_class(report)
    whom = f"of class {name}" if len(class_names(report)) > 1 else "of all requests"
    targets = " Dashed: the targets." if slo_of(report, name) else ""
    yield (
        f"<p>P90 {html.escape(whom)}; nearer to the lower left is better at both.{targets} A thin"
        " line joins the budgets of one family in their order: a larger one brings the first token"
        " earlier and the next ones later, until the queue decides.</p>"
    )
    yield legend(report.shown)
    yield _charts(pareto_charts(report, name))
    items = "".join(
        f"<li>load {front.load:.3g}: {html.escape(', '.join(front.policies))}</li>"
        for front in report.fronts
        if front.slo_class == name
    )
    yield f"<p>Nobody is better in both than:</p><ul>{items}</ul>"


def _fairness(report: Report) -> Iterable[str]:
    yield (
        "<p>Slowdown: time to the end over what the request would have taken alone. Jain's index of"
        " 1/slowdown, 0 for whoever was not served: 1 where everybody is equally well off, 1/n"
        " where one has it all. Recovery: from the end of the busiest ten seconds, if they demand"
        " twice the mean, to three times ten seconds with 90 % kept.</p>"
    )
    yield legend(report.shown)
    yield _charts(fairness_charts(report))
    never = [
        f"<li>{html.escape(policy.policy)} at {plain(point.rate)}/s:"
        f" {point.num_unrecovered} of {point.num_bursts} seeds"
        + (f", the others after {recovery(point)} s" if point.burst_recovery_s is not None else "")
        + "</li>"
        for policy in report.curves
        for point in policy.points
        if point.num_unrecovered
    ]
    if never:
        yield f"<p>Not recovered before the last arrival:</p><ul>{''.join(never)}</ul>"


def _causes(report: Report) -> Iterable[str]:
    yield (
        "<p>A request counts once, by the first of these: it was refused, its first token was late,"
        " its tokens were too slow. What sets the number of prompt tokens of a step binds it: the"
        " pace of a stream (decode slack, gap limit), a first token that is due (TTFT demand), the"
        " tokens of a step, memory (KV blocks), a trial (explore), or nothing (idle: no more was"
        " waiting, or wanted).</p>"
    )
    yield miss_table(report.curves, "Offered requests that missed a target, by the first cause")
    yield binding_table(report.curves, "What bound steps")


def _points(report: Report) -> Iterable[str]:
    if has_curves(report):
        yield promise_table(report.curves, _PROMISES)
    yield machinery_table(
        report.curves, "Planning in real time on this machine, and how steps were predicted"
    )
    others = by_name(policy for policy in report.policies if policy.policy not in report.shown)
    if others:
        yield _details(
            f"The same of {len(others)} more budgets that the search tried",
            promise_table(others, "Budgets that the search tried"),
        )


def _about(report: Report) -> Iterable[str]:
    yield about_table(report)
    document = json.dumps(report.about, indent=1, ensure_ascii=False)
    yield _details("Everything, as JSON", f'<pre tabindex="0">{html.escape(document)}</pre>')


def _crossover_list(report: Report) -> Iterable[str]:
    drawn = drawn_crossovers(report)
    items = [
        f"<li><b>{letter(index)}</b> {html.escape(each.first)} and {html.escape(each.second)}"
        f" change places at {plain(each.rate)}/s, where both keep {share(each.attainment)}</li>"
        for index, each in enumerate(drawn)
    ]
    items += [
        f"<li>{html.escape(each.first)} gives way to {html.escape(each.second)} as the best budget"
        f" at {plain(each.rate)}/s</li>"
        for each in report.budget_crossovers
    ]
    if not drawn and len(report.curves) > 1:
        first = html.escape(report.curves[0].policy)
        yield f"<p>No curve crosses that of {first} by more than a point.</p>"
    if items:
        yield f"<ul>{''.join(items)}</ul>"


def _charts(charts: Iterable[str]) -> str:
    return f'<div class="charts">{"".join(charts)}</div>'


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{html.escape(summary)}</summary>{content}</details>"
