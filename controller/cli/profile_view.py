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
    from controller.tuning.profile import Judged, Spread
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


def print_settings(settings: TunedSettings, other: TunedSettings, title: str = "default") -> None:
    """Show the settings that differ from others."""
    print_changes(settings.changes_from(other), title, "tuned")


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


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
