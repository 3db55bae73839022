"""Settings: flags, environment, TOML file and defaults in one place, checked once.

Owns every setting's name, meaning, unit and default; the command line derives its flags from here.
Order: flag > environment (`PACELINE_*`) > TOML file > profile of tuned settings > default.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from controller.policy.policies import POLICY_NAMES, fixed_budget
from controller.policy.settings import PolicyConfig
from controller.policy.slo import MAX_TARGET_S, OnInfeasible, Slo, SloClass
from engine.config import DEFAULT_MAX_NUM_SEQS
from store.urls import mask_url

DEFAULT_DB_URL = "sqlite:///paceline.db"
DEFAULT_CONFIG_FILE = "paceline.toml"
DEMO_MODEL = "demo"

_MODEL, _SERVER, _ENGINE, _POLICY = "Model", "Server", "Engine", "Policy and promises"


class SettingsError(ValueError):
    """A setting is wrong; the message names it and says what is expected."""


STATIC_POLICY = "static"
_MAX_STEP_TOKENS = 1 << 20


def _setting(
    default: Any, description: str, panel: str, *, metavar: str | None = None, **kwargs: Any
) -> Any:
    extra: dict[str, Any] = {"panel": panel} | ({} if metavar is None else {"metavar": metavar})
    return Field(default=default, description=description, json_schema_extra=extra, **kwargs)


class Settings(BaseSettings):
    """Everything that `paceline serve` can be told."""

    model_config = SettingsConfigDict(
        env_prefix="PACELINE_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
    )

    model: str = _setting(
        DEMO_MODEL,
        "a local directory, a GGUF file, a hub id in safetensors, or `demo`",
        _MODEL,
        min_length=1,
    )
    served_model_name: str | None = _setting(
        None, "name that clients use (default: `demo`, or MODEL as given)", _MODEL, min_length=1
    )
    dtype: str = _setting("auto", "auto, float32, bfloat16, float16 or float64", _MODEL)
    device: str = _setting("auto", "auto (CUDA if there is one), cpu or cuda[:N]", _MODEL)
    attention_backend: Literal["auto", "reference", "flash_attn", "torch_varlen"] = _setting(
        "auto", "the first that works of flash_attn, torch_varlen (CUDA), reference (any)", _MODEL
    )
    is_eager_enforced: bool = _setting(
        False, "run every step plainly instead of replaying decodes as CUDA graphs", _MODEL
    )
    max_model_len: int | None = _setting(
        None, "most tokens of prompt plus output (default: the model's, if the pool holds it)",
        _MODEL, ge=2,
    )  # fmt: skip
    chat_template: Path | None = _setting(
        None, "a Jinja file to render chat messages with (default: the model's own)", _MODEL
    )

    host: str = _setting("127.0.0.1", "address to listen on", _SERVER)
    port: int = _setting(8000, "port to listen on; 0 picks a free one", _SERVER, ge=0, le=65535)
    api_key: SecretStr | None = _setting(
        None, "key that guards every route but /health, /ready and /ping", _SERVER
    )
    db: str = _setting(
        DEFAULT_DB_URL, "telemetry database, sqlite:///… or postgresql+psycopg://…", _SERVER
    )
    drain_timeout_s: float = _setting(
        30.0, "seconds that running requests may take to end at shutdown", _SERVER, ge=0, le=3600
    )
    stuck_after_s: float = _setting(
        120.0,
        "seconds without a finished step after which /health turns red; more for whole prompts",
        _SERVER, gt=0, le=86400,
    )  # fmt: skip

    block_size: int | None = _setting(
        None,
        "tokens per KV block (default: 16, or what the attention backend wants, 256 on CUDA)",
        _ENGINE,
        ge=1,
        le=4096,
    )
    kv_cache_memory_bytes: int | None = _setting(
        None, "bytes of the KV pool (default: 1 GiB on CPU, 70 % of free memory on CUDA)",
        _ENGINE, ge=1,
    )  # fmt: skip
    swap_space: float | None = _setting(
        None,
        "GiB of host memory that take the KV of preempted requests; 0 = none, which computes it"
        " again (default: half the KV pool on CPU, 4 on CUDA, less where memory is short)",
        _ENGINE, ge=0, le=1 << 20,
    )  # fmt: skip
    is_prefix_caching_enabled: bool = _setting(
        True, "share the KV of prompts that begin alike", _ENGINE
    )
    max_num_seqs: int = _setting(
        DEFAULT_MAX_NUM_SEQS,
        "most running requests; unless given, no more than a step may have tokens",
        _ENGINE, ge=1, le=4096,
    )  # fmt: skip
    max_num_batched_tokens: int | None = _setting(
        None,
        "most tokens of one step; the fixed budget of --policy static"
        " (default: 8192, static 512, whole: no bound)",
        _ENGINE, ge=1, le=_MAX_STEP_TOKENS,
    )  # fmt: skip
    max_waiting_requests: int = _setting(1024, "most queued requests", _ENGINE, ge=1)
    seed: int | None = _setting(None, "seed of requests that bring none", _ENGINE, ge=0)
    is_warmup_enabled: bool = _setting(
        True, "time a short sweep of steps at load, as the cost model's prior", _ENGINE
    )

    policy: str = _setting(
        "slo",
        "slo: budget per step from deadlines; static: a fixed token budget; whole: no chunking;"
        " or a baseline: fcfs-N, edf-N, edf-shed-N (N tokens per step), slack-greedy,"
        " smallest-feasible",
        _POLICY, metavar="NAME",
    )  # fmt: skip
    profile: str | None = _setting(
        None,
        "tuned settings: the name of a profile in the database, a YAML file, or `none`"
        " (default: the model's active one, if there is one)",
        _POLICY, min_length=1,
    )  # fmt: skip
    slo_class: tuple[SloClass, ...] = _setting(
        (),
        "a class of service, repeatable:"
        " NAME:ttft_ms=500,tpot_ms=50,e2e_ms=…,weight=1,on_infeasible=reject|degrade|queue",
        _POLICY,
    )
    default_slo_class: str = _setting(
        "default", "class of requests that name none (`default` has no targets)", _POLICY
    )
    is_lenient_slo: bool = _setting(
        False, "ignore and count malformed SLO headers instead of refusing them", _POLICY
    )
    # Values of a profile, set by `load_settings` on a class of its own.
    _tuned: ClassVar[Mapping[str, Any]] = {}

    planner: PolicyConfig = Field(
        default_factory=PolicyConfig,
        description="the SLO planner's knobs (TOML table [planner] or PACELINE_PLANNER__*)",
    )

    @field_validator("slo_class", mode="before")
    @classmethod
    def _parse_classes(cls, value: Any) -> Any:
        entries = (value,) if isinstance(value, (str, dict)) else value
        classes = tuple(parse_slo_class(entry) for entry in entries)
        names = [item.name for item in classes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"SLO class {twice[0]!r} is given twice")
        return classes

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, value: str) -> str:
        names = f"{STATIC_POLICY}, {', '.join(POLICY_NAMES)}"
        try:
            budget = None if value == STATIC_POLICY else fixed_budget(value)
        except ValueError:
            raise ValueError(f"expected one of {names} (N tokens per step)") from None
        if budget is not None and budget > _MAX_STEP_TOKENS:
            raise ValueError(f"a step has at most {_MAX_STEP_TOKENS} tokens")
        return value

    @field_validator("chat_template")
    @classmethod
    def _check_template(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_file():
            raise ValueError(f"no such file: {value}")
        return value

    @property
    def slo_classes(self) -> dict[str, SloClass]:
        """Classes by name; `default` is always there."""
        classes = {"default": SloClass("default")}
        classes.update((item.name, item) for item in self.slo_class)
        return classes

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.served_model_name or self.model

    @property
    def effective_max_num_batched_tokens(self) -> int:
        """The step's cap in tokens, whatever the policy."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        if self.policy == STATIC_POLICY:
            return 512
        if self.policy == "whole":
            return _MAX_STEP_TOKENS
        return max(8192, fixed_budget(self.policy) or 0)

    @property
    def effective_max_num_seqs(self) -> int:
        """Most running requests: what was asked for, or the default within the step's cap."""
        if "max_num_seqs" in self.model_fields_set:
            return self.max_num_seqs
        return min(self.max_num_seqs, self.effective_max_num_batched_tokens)

    @property
    def planner_name(self) -> str:
        """The policy as `make_planner` calls it: `static` is `fcfs-N`."""
        if self.policy == STATIC_POLICY:
            return f"fcfs-{self.effective_max_num_batched_tokens}"
        return self.policy

    def to_json(self) -> dict[str, Any]:
        """Return the effective settings as JSON values, secrets and passwords masked."""
        values = dict(self.model_dump(mode="json"))
        values["db"] = mask_url(self.db)
        values["max_num_seqs"] = self.effective_max_num_seqs
        return values

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Put the TOML file below the environment, and what a profile holds below the file."""
        file = cls.model_config.get("toml_file")
        sources = [init_settings, env_settings]
        if file is not None:
            sources.append(TomlConfigSettingsSource(settings_cls, toml_file=Path(str(file))))
        if cls._tuned:
            sources.append(InitSettingsSource(settings_cls, dict(cls._tuned)))
        return tuple(sources)


def parse_slo_class(entry: Any) -> SloClass:
    """Read a class from `NAME:key=value,…` or a table; ValueError names the key."""
    if isinstance(entry, SloClass):
        return entry
    if isinstance(entry, str):
        name, _, rest = entry.partition(":")
        pairs = [item.partition("=") for item in rest.split(",") if item]
        keys = [key.strip() for key, _, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ValueError(f"{twice[0]} is given twice in SLO class {name.strip()!r}")
        entry = {"name": name.strip(), **{key.strip(): value.strip() for key, _, value in pairs}}
    if not isinstance(entry, dict):
        raise ValueError(f"expected NAME:key=value,… or a table, got {entry!r}")  # noqa: TRY004 - pydantic reports ValueError
    table = dict(entry)
    name = str(table.pop("name", ""))

    def number(key: str, default: float | None = None) -> float | None:
        raw = table.pop(key, None)
        if raw is None:
            return default
        try:
            if isinstance(raw, bool):
                raise TypeError  # noqa: TRY301 - true is 1.0 to float()
            return float(raw)
        except (TypeError, ValueError):
            raise ValueError(f"{key} of SLO class {name!r} must be a number, got {raw!r}") from None

    def seconds(key: str) -> float | None:
        value = number(key)
        if value is None:
            return None
        # Here, where the number still has the unit and the class that it was given with.
        if not (math.isfinite(value) and 0 < value / 1000 <= MAX_TARGET_S):
            raise ValueError(
                f"{key} of SLO class {name!r} must be a positive number of at most"
                f" {MAX_TARGET_S * 1000:g}, got {value:g}"
            )
        return value / 1000

    slo = Slo(ttft_s=seconds("ttft_ms"), tpot_s=seconds("tpot_ms"), e2e_s=seconds("e2e_ms"))
    weight = number("weight", 1.0)
    infeasible = str(table.pop("on_infeasible", OnInfeasible.REJECT))
    if infeasible not in list(OnInfeasible):
        raise ValueError(
            f"on_infeasible of SLO class {name!r} must be reject, degrade or queue,"
            f" got {infeasible!r}"
        )
    if table:
        raise ValueError(f"unknown key {sorted(table)[0]!r} in SLO class {name!r}")
    return SloClass(name, slo, 1.0 if weight is None else weight, OnInfeasible(infeasible))


def load_settings(
    flags: dict[str, Any],
    config_file: Path | None = None,
    tuned: Mapping[str, Any] | None = None,
) -> Settings:
    """Compose the settings; SettingsError names the field, where the value came from is up to it.

    `flags` holds only what was given on the command line. `config_file` defaults to
    `paceline.toml` in the current directory, if it is there. `tuned` are the values of a profile.
    """
    file = config_file
    if file is None and Path(DEFAULT_CONFIG_FILE).is_file():
        file = Path(DEFAULT_CONFIG_FILE)
    if file is not None:
        _check_toml(file)

    class _Composed(Settings):
        model_config = SettingsConfigDict(toml_file=file)
        _tuned = tuned or {}

    try:
        composed = _Composed(**flags)
    except ValidationError as error:
        raise SettingsError(_explain(error)) from error
    except ValueError as error:
        raise SettingsError(str(error)) from error
    if composed.default_slo_class not in composed.slo_classes:
        known = ", ".join(sorted(composed.slo_classes))
        raise SettingsError(
            f"default_slo_class: no class {composed.default_slo_class!r}; known: {known}"
        )
    _check_budget(composed)
    return composed


def _check_budget(settings: Settings) -> None:
    """SettingsError if a policy's fixed budget exceeds the cap that was given for a step."""
    if settings.policy == STATIC_POLICY:
        return
    budget, cap = fixed_budget(settings.policy), settings.max_num_batched_tokens
    if budget is not None and cap is not None and budget > cap:
        raise SettingsError(
            f"policy: {settings.policy} computes up to {budget} tokens in a step, but"
            f" max_num_batched_tokens is {cap}"
        )


def _check_toml(file: Path) -> None:
    try:
        with file.open("rb") as stream:
            tomllib.load(stream)
    except OSError as error:
        raise SettingsError(f"--config {file}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"--config {file}: {error}") from error


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"]) or "settings"
        if item["type"] == "extra_forbidden":
            lines.append(f"{field}: no such setting")
        else:
            message = item["msg"].removeprefix("Value error, ")
            # A check of ours that names the value needs no second one around it.
            got = "" if ", got " in message else f", got {item['input']!r}"
            lines.append(f"{field}: {message}{got}")
    return "; ".join(lines)
