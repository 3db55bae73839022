"""How profiles look in a terminal: what differs from the defaults, and what that gains.

Owns words and layout only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

from controller.cli.output import wide_console
from store.text import format_instant

if TYPE_CHECKING:
    from controller.tuning.profile import Judged, Spread
    from controller.tuning.space import TunedSettings
    from store.profiles import ProfileRecord


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
    table = Table(box=None, pad_edge=False)
    for title in ("held-out part", "defaults", "range", "tuned", "range"):
        table.add_column(title, justify="left" if title == "held-out part" else "right")
    for name, after in judged.after.items():
        before = judged.before.get(name)
        table.add_row(name, *_cells(before, name), *_cells(after, name))
    console = wide_console()
    console.print(table)
    console.print(f"{judged.verdict}: {judged.statement}", highlight=False)


def _cells(spread: Spread | None, name: str) -> tuple[str, str]:
    if spread is None:
        return "-", "-"
    low, high = _measure(spread.min, name), _measure(spread.max, name)
    return _measure(spread.mean, name), f"{low} … {high}"


def _measure(value: float, name: str) -> str:
    if name.startswith("attainment"):
        return f"{value:.1%}"
    return f"{value * 1000:,.0f} ms" if name.endswith("p99_s") else f"{value:,.0f}"


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
