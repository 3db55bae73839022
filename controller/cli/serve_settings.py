"""What a server may start with: settings alone, or over those of a profile.

Owns that choice as far as it can be made before anything is loaded. Must not load a model: whether
a profile fits the device is found out by `wiring`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from controller.config import Settings, SettingsError, load_settings
from controller.runtime.tuned_for import TunedFor
from controller.tuning.lookup import active_profiles, named_profile
from controller.tuning.profile import NO_PROFILE, ProfileError

SettingsChoice = tuple[Settings, TunedFor | None]
"""Settings, and whom their profile belongs to (None without one)."""

_TUNED_POLICY = "slo"


def settings_to_serve(
    flags: dict[str, Any], config: Path | None, warn: Callable[[str], None]
) -> tuple[SettingsChoice, ...]:
    """Return what to start with; the first whose profile fits the loaded engine is taken.

    A profile that was asked for is the only choice: SettingsError says what is wrong with it. Where
    nobody asked, a server starts whatever the database holds: `warn` is told what is wrong with
    active profiles, and the last choice are the settings without any.
    """
    plain = load_settings(flags, config)
    if plain.profile == NO_PROFILE:
        return ((plain, None),)

    def tuned(server_values: dict[str, Any], owner: TunedFor) -> SettingsChoice:
        refusal = owner.refusal(plain.model_name, source=plain.model)
        if refusal is not None:
            raise ProfileError(refusal)
        return load_settings(flags, config, server_values), owner

    choices: list[SettingsChoice] = []
    if plain.profile is not None:
        try:
            profile = named_profile(plain.profile, plain.db)
            choices.append(tuned(profile.server_values(), profile.tuned_for))
        except ProfileError as error:
            raise SettingsError(f"--profile: {error}") from error
    else:
        found = active_profiles(plain.db, plain.model_name)
        problems = list(found.problems)
        for profile in found.profiles:
            try:
                choices.append(tuned(profile.server_values(), profile.tuned_for))
            except (ProfileError, SettingsError) as error:
                problems.append(str(error))
        for problem in problems:
            warn(f"the active profile is left out: {problem}")
        choices.append((plain, None))
    first, owner = choices[0]
    if owner is not None and first.policy != _TUNED_POLICY:
        warn(
            f"profile {owner.profile!r} was tuned for --policy {_TUNED_POLICY}; under"
            f" {first.policy!r} most of its settings mean nothing"
        )
    return tuple(choices)
