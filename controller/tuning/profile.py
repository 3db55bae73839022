"""`BudgetProfile`: what tuning makes and a server loads: settings, whose they are, what they gain.

Owns the document, as YAML and as JSON, and every check of it. Must not search, simulate or speak
SQL.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import yaml

from controller.runtime.tuned_for import TunedFor
from controller.tuning.influence import Effect, Influence
from controller.tuning.space import DEFAULTS, MAX_NUM_SEQS, TunedSettings
from store.profiles import MAX_NAME_LENGTH, ProfileRecord

PROFILE_FORMAT: Final = 1
NO_PROFILE: Final = "none"
_RESERVED: Final = (NO_PROFILE, "default")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_FILE_BYTES: Final = 1 << 20


class ProfileError(ValueError):
    """A profile cannot be used; the message names the field."""


class Verdict(enum.StrEnum):
    """Whether settings are better than the shipped defaults on requests that did not choose them;
    unclear is a difference within its own uncertainty.
    """

    BETTER = "better"
    UNCLEAR = "unclear"
    WORSE = "worse"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a profile comes from.

    `workload` and `hardware` say what was simulated, `seeds` and `held_out_seeds` how often; `seed`
    is the search's. `num_trials` counts all that were tried; `trial` is the one that was chosen, 0
    if nothing was better than the shipped defaults. `classes` are the promises, as JSON. `versions`
    are those of Paceline and Optuna. `created_at` is epoch milliseconds UTC. `run` is the server
    run that was replayed, if one was.
    """

    workload: str
    hardware: str
    seeds: tuple[int, ...]
    held_out_seeds: tuple[int, ...]
    num_trials: int
    trial: int
    seed: int
    classes: tuple[Mapping[str, Any], ...]
    versions: Mapping[str, str]
    created_at: int
    study: str | None = None
    run: str | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over scenes: mean, least and greatest."""

    mean: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class Judged:
    """What the shipped defaults and the profile's settings did on the held-out part.

    `before` and `after` hold a `Spread` by measure (`attainment`, `attainment of CLASS`,
    `useful_tokens_per_s`, `gap_p99_s`, `ttft_p99_s`, `tpot_p99_s`); `difference` is that of
    attainments scene by scene. `harms` are the guards that are overstepped, and by how much.
    """

    verdict: Verdict
    statement: str
    before: Mapping[str, Spread]
    after: Mapping[str, Spread]
    difference: Spread
    harms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BudgetProfile:
    """Settings with a name, and what the search learnt of knobs. ProfileError names the field."""

    name: str
    settings: TunedSettings
    tuned_for: TunedFor
    provenance: Provenance
    judged: Judged
    influence: Influence = field(default_factory=Influence)

    def __post_init__(self) -> None:
        """Check the name."""
        check_name(self.name)

    def server_values(self) -> dict[str, Any]:
        """Return the settings as a source of `Settings`, below files and above defaults.

        Seats that are the shipped ones are left out: those stay within the tokens of a step.
        """
        values: dict[str, Any] = {"profile": self.name, "planner": asdict(self.settings.planner)}
        if self.settings.max_num_seqs != DEFAULTS.max_num_seqs:
            values[MAX_NUM_SEQS] = self.settings.max_num_seqs
        return values

    def to_json(self) -> dict[str, Any]:
        """Return the document as JSON values."""
        owner = asdict(self.tuned_for)
        del owner["profile"]
        return {
            "format": PROFILE_FORMAT,
            "name": self.name,
            "belongs_to": owner,
            "settings": self.settings.to_json(),
            "judged": _plain(asdict(self.judged)),
            "influence": _plain(asdict(self.influence)),
            "provenance": _plain(asdict(self.provenance)),
        }

    @classmethod
    def from_json(cls, document: Any) -> BudgetProfile:
        """Rebuild a profile; ProfileError names the field that is unknown, missing or wrong."""
        if not isinstance(document, Mapping):
            raise ProfileError("a profile must be a table of fields")
        if document.get("format") != PROFILE_FORMAT:
            raise ProfileError(f"format must be {PROFILE_FORMAT}, got {document.get('format')!r}")
        parts = ("format", "name", "belongs_to", "settings", "judged", "provenance")
        _check_keys(document, "", (*parts, "influence"), parts)
        name = _text(document, "name", "")
        check_name(name)
        settings = _table(document, "settings", "")
        try:
            tuned = TunedSettings.from_json(settings)
        except (TypeError, ValueError) as error:
            raise ProfileError(f"settings.{error}") from error
        return cls(
            name,
            tuned,
            _owner(name, _table(document, "belongs_to", "")),
            _provenance(_table(document, "provenance", "")),
            _judged(_table(document, "judged", "")),
            _influence(_table(document, "influence", ""))
            if "influence" in document
            else Influence(),
        )

    def to_record(self, *, is_active: bool = False) -> ProfileRecord:
        """Return the row that keeps the profile in a database."""
        return ProfileRecord(
            name=self.name,
            created_at=self.provenance.created_at,
            model=self.tuned_for.model,
            device=self.tuned_for.device,
            verdict=self.judged.verdict,
            document=self.to_json(),
            study=self.provenance.study,
            is_active=is_active,
        )

    def to_yaml(self) -> str:
        """Return the document as YAML, the settings near the top."""
        return str(yaml.safe_dump(self.to_json(), sort_keys=False, allow_unicode=True, width=96))


def read_profile(path: Path) -> BudgetProfile:
    """Read a profile from a YAML file; ProfileError names the file and the field."""
    try:
        with path.open("rb") as file:
            # What is cut off there is no profile, and is found out as one that is damaged.
            text = file.read(_MAX_FILE_BYTES).decode("utf-8")
        return BudgetProfile.from_json(yaml.load(text, _Loader))  # noqa: S506 - a safe loader
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ProfileError(f"{path}: not YAML: {reason}") from error
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error


def check_name(name: str) -> None:
    """ProfileError unless `name` can be typed, and cannot be taken for a file or for no profile."""
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME_LENGTH or is_file_name(name):
        raise ProfileError(
            f"name must be letters, digits, `.`, `_` and `-`, at most {MAX_NAME_LENGTH}, and not"
            f" end like a YAML file, got {name!r}"
        )
    if name in _RESERVED:
        raise ProfileError(f"name must not be {name!r}, which means no profile")


def is_file_name(text: str) -> bool:
    """Whether a profile that is asked for by `text` is a file, not a name in the database."""
    return "/" in text or text.endswith((".yaml", ".yml"))


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # the library has no types
    """YAML without the trap of a key that is given twice: the last one would win silently."""


def _mapping_once(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, str):
            raise ProfileError(f"every key must be text, got {key!r}")
        if key in seen:
            raise ProfileError(f"{key} is given twice")
        seen.add(key)
    return dict(loader.construct_mapping(node, deep=True))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_once)


def _owner(name: str, values: Mapping[str, Any]) -> TunedFor:
    known = tuple(each.name for each in fields(TunedFor) if each.name != "profile")
    _check_keys(values, "belongs_to.", known, ())
    return TunedFor(name, **{key: _text_or_none(values, key, "belongs_to.") for key in known})


def _provenance(values: Mapping[str, Any]) -> Provenance:
    known = tuple(each.name for each in fields(Provenance))
    _check_keys(values, "provenance.", known, known[:-2])
    for key in ("num_trials", "trial", "seed", "created_at"):
        if not _is_count(values[key]):
            raise ProfileError(
                f"provenance.{key} must be an integer of at least 0, got {values[key]!r}"
            )
    classes = values["classes"]
    if not isinstance(classes, list) or not all(isinstance(each, Mapping) for each in classes):
        raise ProfileError(f"provenance.classes must be a list of tables, got {classes!r}")
    return Provenance(
        workload=_text(values, "workload", "provenance."),
        hardware=_text(values, "hardware", "provenance."),
        seeds=_seeds(values, "seeds"),
        held_out_seeds=_seeds(values, "held_out_seeds"),
        num_trials=values["num_trials"],
        trial=values["trial"],
        seed=values["seed"],
        classes=tuple(classes),
        versions=_table(values, "versions", "provenance."),
        created_at=values["created_at"],
        study=_text_or_none(values, "study", "provenance."),
        run=_text_or_none(values, "run", "provenance."),
    )


def _seeds(values: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = values[key]
    if not isinstance(value, list) or not all(_is_count(each) for each in value):
        raise ProfileError(f"provenance.{key} must be a list of seeds, got {value!r}")
    return tuple(value)


def _judged(values: Mapping[str, Any]) -> Judged:
    known = tuple(each.name for each in fields(Judged))
    _check_keys(values, "judged.", known, known[:-1])
    verdict = _text(values, "verdict", "judged.")
    if verdict not in list(Verdict):
        raise ProfileError(f"judged.verdict must be one of {', '.join(Verdict)}, got {verdict!r}")
    sides = {
        side: {
            key: _spread(_table(table, key, f"judged.{side}."), f"judged.{side}.{key}.")
            for key in table
        }
        for side, table in ((s, _table(values, s, "judged.")) for s in ("before", "after"))
    }
    harms = _table(values, "harms", "judged.") if "harms" in values else {}
    return Judged(
        Verdict(verdict),
        _text(values, "statement", "judged."),
        difference=_spread(_table(values, "difference", "judged."), "judged.difference."),
        harms={key: _number(harms, key, "judged.harms.") for key in harms},
        **sides,
    )


def _influence(values: Mapping[str, Any]) -> Influence:
    known = tuple(each.name for each in fields(Influence))
    _check_keys(values, "influence.", known, known)
    return Influence(**{key: _effects(values[key], f"influence.{key}") for key in known})


def _effects(values: Any, path: str) -> tuple[Effect, ...]:
    if not isinstance(values, list) or not all(isinstance(each, Mapping) for each in values):
        raise ProfileError(f"{path} must be a list of tables, got {values!r}")
    return tuple(_effect(each, f"{path}.") for each in values)


def _effect(values: Mapping[str, Any], path: str) -> Effect:
    names = tuple(each.name for each in fields(Effect))
    _check_keys(values, path, names, names)
    guards = values["guards"]
    if not isinstance(guards, list) or not all(isinstance(each, str) for each in guards):
        raise ProfileError(f"{path}guards must be a list of names, got {guards!r}")
    numbers = {key: _number(values, key, path) for key in ("value", "gain", "kept")}
    return Effect(_text(values, "knob", path), **numbers, guards=tuple(guards))


def _spread(values: Mapping[str, Any], path: str) -> Spread:
    names = tuple(each.name for each in fields(Spread))
    _check_keys(values, path, names, names)
    return Spread(*(_number(values, name, path) for name in names))


def _check_keys(
    values: Mapping[str, Any], path: str, known: tuple[str, ...], needed: tuple[str, ...]
) -> None:
    for key in values:
        if key not in known:
            raise ProfileError(f"{path}{key}: no such field; known are {', '.join(known)}")
    for key in needed:
        if key not in values:
            raise ProfileError(f"{path}{key} is missing")


def _table(values: Mapping[str, Any], key: str, path: str) -> Mapping[str, Any]:
    value = values[key]
    if not isinstance(value, Mapping):
        raise ProfileError(f"{path}{key} must be a table, got {value!r}")
    return value


def _text(values: Mapping[str, Any], key: str, path: str) -> str:
    value = values[key]
    if not isinstance(value, str) or not value:
        raise ProfileError(f"{path}{key} must be text, got {value!r}")
    return value


def _text_or_none(values: Mapping[str, Any], key: str, path: str) -> str | None:
    return None if values.get(key) is None else _text(values, key, path)


def _number(values: Mapping[str, Any], key: str, path: str) -> float:
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ProfileError(f"{path}{key} must be a finite number, got {value!r}")
    return float(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _plain(value: Any) -> Any:
    """Return JSON values: tuples as lists, enums as their text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value
