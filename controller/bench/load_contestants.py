"""Who can be measured under a mixed load: our server under any policy.

Owns the names of policies, and where each server's telemetry is kept for the replay. Must not send
load.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controller.bench.client import LoadClient, StreamClient, open_http
from controller.bench.load_classes import LoadClass
from controller.bench.load_history import ServerHistory, read_history
from controller.bench.load_rounds import LoadContestant, LoadResult
from controller.bench.servers import ServerConfig, running_server, serve_command
from controller.policy.policies import POLICY_NAMES, fixed_budget
from engine.clock import Clock

DEFAULT_POLICIES: Final = ("slo", "static-64", "static-128", "static-256")
PROBE_POLICY: Final = "static-256"
"""What serves the calibration: a fixed budget that knows no promise."""

_STATIC: Final = re.compile(r"static-([1-9][0-9]{0,6})")


def policy_config(key: str) -> ServerConfig:
    """Return the server of a policy; ValueError if it is none.

    `static-N` is `--policy static` with its cap on every step, the rest are policies by name: a
    budget of N is the planner's own, and the engine's cap stays what it is by default.
    """
    if key == "slo":
        return ServerConfig("SLO planner", ("--policy", "slo"), has_promises=True)
    if key == "whole":
        return ServerConfig("whole prompt", ("--policy", "whole"))
    found = _STATIC.fullmatch(key)
    if found is not None:
        flags = ("--policy", "static", "--max-num-batched-tokens", found[1])
        return ServerConfig(f"static {found[1]}", flags)
    try:
        fixed_budget(key)
    except ValueError:
        raise ValueError(
            f"policy must be static-N or one of {', '.join(POLICY_NAMES)}, got {key!r}"
        ) from None
    return ServerConfig(key, ("--policy", key))


@dataclass(frozen=True, slots=True)
class StartedServers:
    """Servers of one model, each started for its turn, with a database in `folder` that stays.

    `classes` become classes of every server, so that weights hold; targets come with the requests.
    `extra` are further words of the `serve` command line, `ready_timeout_s` seconds.
    """

    model: str
    classes: tuple[LoadClass, ...]
    folder: Path
    clock: Clock
    extra: tuple[str, ...] = ()
    ready_timeout_s: float = 900.0

    def contestants(self, keys: Sequence[str]) -> list[LoadContestant]:
        """Return one contestant per policy, in order; ValueError on an unknown one."""
        return [self._contestant(key) for key in keys]

    def database(self, round_no: int, key: str) -> Path:
        """Return where the server of that turn keeps its telemetry."""
        return self.folder / f"round-{round_no}-{key}.db"

    def history_of(self, result: LoadResult) -> ServerHistory:
        """Return what that run's server recorded; ReplayError if it cannot be read."""
        return read_history(f"sqlite:///{self.database(result.round_no, result.key)}")

    def command(self, key: str, port: int, database: Path) -> list[str]:
        """Return the command line of a policy's server."""
        flags = [word for each in self.classes for word in each.serve_flags]
        return serve_command(self.model, policy_config(key), port, database, [*flags, *self.extra])

    def _contestant(self, key: str) -> LoadContestant:
        def open_client(round_no: int) -> contextlib.AbstractAsyncContextManager[StreamClient]:
            return self.open(key, self.database(round_no, key))

        return LoadContestant(key, policy_config(key).label, open_client)

    @contextlib.asynccontextmanager
    async def open(self, key: str, database: Path) -> AsyncIterator[StreamClient]:
        """Start a policy's server with that database, yield a client, end it afterwards."""
        async with (
            running_server(
                lambda port, _: self.command(key, port, database), self.ready_timeout_s
            ) as base_url,
            open_http(base_url) as http,
        ):
            yield LoadClient(http, self.clock, self.model)
