"""How profiles look in a terminal: what differs from the defaults, and what that gains.

Owns words and layout only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from controller.cli.output import wide_console
from controller.simulation.digits import MISSING, millis, plain, share, share_range
from store.text import format_instant

if TYPE_CHECKING:
    from controller.tuning.influence import Effect, Influence
    from controller.tuning.profile import BudgetProfile, Judged, Spread
    from controller.tuning.space import TunedSettings
    from store.profiles import ProfileRecord

_LABELS: Final = {
    "attainment": "promises kept, by weight",
    "useful_tokens_per_s": "useful tokens/s",
    "ttft_p99_s": "TTFT P99",
    "tpot_p99_s": "TPOT P99",
    "gap_p99_s": "longest gap P99",
}


def print_profiles(records: Iterable[ProfileRecord]) -> None:
    """List profiles, one a line."""
    table = Table(box=None, pad_edge=False)
    for title in ("profile", "active", "model", "device", "verdict", "made"):
        table.add_column(title)
    for record in records:
        table.add_row(
            record.name,
            "*" if record.is_active else "",
            record.model or "-",
            record.device or "-",
            record.verdict,
            format_instant(record.created_at),
        )
    wide_console().print(table)


def promises_of(classes: Iterable[Mapping[str, Any]]) -> str:
    """Return a profile's classes in words; what is no number of seconds is left out."""
    return "; ".join(_promise(each) for each in classes)


def _promise(item: Mapping[str, Any]) -> str:
    slo = item.get("slo")
    known = slo if isinstance(slo, Mapping) else {}
    words = [
        f"{key.removesuffix('_s').upper()} {known[key] * 1e3:g} ms"
        for key in ("ttft_s", "tpot_s", "e2e_s")
        if isinstance(known.get(key), int | float)
    ]
    weight = item.get("weight", 1.0)
    heavy = "" if weight == 1.0 else f", weight {weight}"
    return f"{item.get('name')} ({', '.join(words) or 'no targets'}{heavy})"


def print_all(profile: BudgetProfile) -> None:
    """Show what single knobs did, what the profile changes, and what that gains."""
    console = wide_console()
    if profile.influence.alone:
        console.print()
        print_alone(profile.influence)
    console.print()
    print_tuned(profile.settings, profile.influence)
    console.print()
    print_judged(profile.judged)


def print_alone(influence: Influence) -> None:
    """Show what each knob did to the tuning part when it alone was not as shipped."""
    from controller.tuning.space import KNOBS

    defaults = {knob.name: _value(knob.default) for knob in KNOBS}
    effects = [each for each in influence.alone if not each.is_none]
    console = wide_console()
    if effects:
        table = Table(box=None, pad_edge=False)
        table.add_column("one knob alone")
        for title in ("default", "tried", "kept", "guards"):
            table.add_column(title, justify="right")
        table.add_column("")
        # Effects come with the largest gain first, and so do the knobs; what one knob did is read
        # from its low end to its high one.
        for name in dict.fromkeys(each.knob for each in effects):
            labels = (name, defaults.get(name, MISSING))
            for each in sorted((e for e in effects if e.knob == name), key=lambda e: e.value):
                words = (*labels, _value(each.value), *_points(each), ", ".join(each.guards))
                table.add_row(*words)
                labels = ("", "")
        console.print(table)
    moved = {each.knob for each in effects}
    others = dict.fromkeys(each.knob for each in influence.alone if each.knob not in moved)
    if others:
        console.print(f"no difference: {', '.join(others)}", highlight=False)


def print_tuned(settings: TunedSettings, influence: Influence) -> None:
    """Show the settings that are not as shipped, and what each of them gained when tuning."""
    from controller.tuning.space import DEFAULTS, KNOBS, MAX_NUM_SEQS, MAX_RUNNING

    changes = settings.changes_from(DEFAULTS)
    if not changes:
        wide_console().print("no setting differs from the defaults")
        return
    worth = {each.knob: _points(each) for each in influence.found}
    reasons = {knob.name: knob.reason for knob in KNOBS}
    table = Table(box=None, pad_edge=False)
    table.add_column("setting")
    for title in ("default", "tuned", "kept", "guards"):
        table.add_column(title, justify="right")
    table.add_column("what it does")
    for name, (old, new) in changes.items():
        knob = MAX_RUNNING if name == MAX_NUM_SEQS else name
        points = worth.get(knob, (MISSING, ""))
        table.add_row(name, _value(old), _value(new), *points, reasons.get(knob, ""))
    wide_console().print(table)


def print_changes(changes: Mapping[str, tuple[Any, Any]], before: str, after: str) -> None:
    """Show settings by name with two values each."""
    if not changes:
        wide_console().print("no setting differs")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("setting")
    table.add_column(before, justify="right")
    table.add_column(after, justify="right")
    for name, (old, new) in changes.items():
        table.add_row(name, _value(old), _value(new))
    wide_console().print(table)


def print_judged(judged: Judged) -> None:
    """Show what the defaults and the settings did on the held-out part, and the verdict."""
    columns = {"defaults": judged.before, "tuned": judged.after}
    if judged.before == judged.after:
        # The defaults themselves: two equal columns would look like a comparison.
        del columns["tuned"]
    table = Table(box=None, pad_edge=False)
    table.add_column("held-out part")
    for title in columns:
        table.add_column(title, justify="right")
        table.add_column("range", justify="right")
    for name in judged.after:
        cells = (_cells(spreads.get(name), name) for spreads in columns.values())
        table.add_row(_label(name), *(text for pair in cells for text in pair))
    console = wide_console()
    console.print(table)
    console.print(f"{judged.verdict}: {judged.statement}", highlight=False)


def _label(name: str) -> str:
    """Return a measure's name in words; a class's attainment is called by the class."""
    return _LABELS.get(name) or name.replace("attainment of ", "in time: ")


def _cells(spread: Spread | None, name: str) -> tuple[str, str]:
    if spread is None:
        return MISSING, MISSING
    if name.startswith("attainment"):
        return share(spread.mean), share_range(spread.min, spread.max)
    if not name.endswith("_s") or name == "useful_tokens_per_s":
        return plain(spread.mean), _range(plain(spread.min), plain(spread.max))
    # One unit for the three, so that they can be compared at a glance.
    unit, shown = (" s", plain) if spread.max >= 1.0 else (" ms", millis)
    return shown(spread.mean) + unit, _range(shown(spread.min), shown(spread.max)) + unit


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low}–{high}"


def _points(effect: Effect) -> tuple[str, str]:
    """Return points of promises that were kept, and of what the guards found, if they did."""
    found = effect.gain - effect.kept
    guards = "" if abs(found) < 5e-5 else f"{found * 100:+.2f}"
    return f"{effect.kept * 100:+.2f}", guards


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
