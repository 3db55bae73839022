"""`paceline serve MODEL`: settings, start-up, banner, status line, shutdown.

Owns the life of the server process. Exit codes: 0 after a clean stop, 1 if a step had to be left
behind, 2 if it cannot start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controller.cli.banner import banner, status_line
from controller.cli.options import with_settings
from controller.cli.progress import CurrentStderr, StartupProgress
from controller.cli.serve_settings import SettingsChoice, settings_to_serve
from controller.config import Settings, SettingsError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from controller.runtime.service import Service
    from controller.runtime.wiring import Runtime

EXIT_HUNG = 1
EXIT_CANNOT_START = 2
_STOPPED_LOADING = "stopped while loading"
_STATUS_INTERVAL_S = 10.0


@with_settings
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="`demo`, a local directory, a GGUF file or a hub id. (default: demo)",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with settings (default: paceline.toml if it is there)",
            show_default=False,
        ),
    ] = None,
    print_settings: Annotated[
        bool, typer.Option("--print-settings", help="Print the effective settings and exit.")
    ] = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Serve a model over OpenAI-compatible HTTP, keeping each request's latency targets."""
    if model is not None:
        flags["model"] = model
    try:
        choices = settings_to_serve(flags, config, _warn)
    except SettingsError as error:
        _fail(str(error))
    settings = choices[0][0]
    if print_settings:
        typer.echo(json.dumps(settings.to_json(), indent=2))
        return
    listener = _listen(settings)
    logging.basicConfig(
        level=logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        handlers=[logging.StreamHandler(CurrentStderr())],
    )
    # Libraries that draw bars of their own would garble ours.
    os.environ.setdefault("TQDM_DISABLE", "1")
    with contextlib.closing(listener):
        try:
            failure = asyncio.run(_serve(choices, listener))
        except _HungError as error:
            _leave(str(error), EXIT_HUNG)
    if failure == _STOPPED_LOADING:
        _leave(failure, EXIT_CANNOT_START)
    if failure is not None:
        _fail(failure)
    print("paceline: stopped", flush=True)


class _HungError(Exception):
    """The engine's thread was left behind inside a step."""


def _leave(message: str, code: int) -> typing.NoReturn:
    """Exit at once: a thread is still anywhere in native code, which an orderly end would abort."""
    _say_error(message)
    sys.stdout.flush()
    os._exit(code)


def _say_error(message: str) -> None:
    print(f"paceline: error: {message}", file=sys.stderr, flush=True)


def _warn(message: str) -> None:
    print(f"paceline: warning: {message}", file=sys.stderr, flush=True)


def _fail(message: str) -> typing.NoReturn:
    _say_error(message)
    raise typer.Exit(EXIT_CANNOT_START)


def _listen(settings: Settings) -> socket.socket:
    """Bind before loading anything: a taken port should not cost a minute."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # The protocol by name: asyncio sets TCP_NODELAY only where it is told that this is TCP, and
    # without it a stream's events wait for acknowledgements, up to 40 ms each.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        _fail(
            f"port {settings.port} on {settings.host}: {error.strerror};"
            " choose another with --port, or --port 0 for any"
        )
    return listener


async def _serve(choices: Sequence[SettingsChoice], listener: socket.socket) -> str | None:
    """Answer at once, load, serve until a signal, stop in order; returns why it could not start."""
    import uvicorn

    from controller.api.door import Door

    settings = choices[0][0]
    door = Door()
    event_loop = asyncio.get_running_loop()
    service: Service | None = None

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            # uvicorn raises the signal again once it has stopped, which would end the process
            # before the loop is drained and telemetry is flushed.
            handled = (signal.SIGINT, signal.SIGTERM)
            previous = [signal.signal(number, self.handle_exit) for number in handled]
            try:
                yield
            finally:
                for number, handler in zip(handled, previous, strict=True):
                    signal.signal(number, handler)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if service is not None:
                # Not called here: a signal can land inside a lock that draining takes.
                event_loop.call_soon_threadsafe(service.drain)
            super().handle_exit(sig, frame)

    server = Server(
        uvicorn.Config(
            door,
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)),
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not (server.started or serving.done()):  # noqa: ASYNC110 - uvicorn offers no event
        # A signal is ours only once the server has begun; before, it would end the process unheard.
        await asyncio.sleep(0)
    loading = _load(choices)
    await asyncio.wait(
        (asyncio.ensure_future(serving), loading), return_when=asyncio.FIRST_COMPLETED
    )
    if not loading.done():
        await serving
        return _STOPPED_LOADING
    runtime = loading.result()
    if isinstance(runtime, str):
        server.should_exit = True
        await serving
        return runtime
    service = runtime.service
    try:
        door.open(_app(runtime))
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(banner(runtime, f"http://{shown}:{port}"), flush=True)
        status = asyncio.create_task(_report_status(runtime))
        await serving
        status.cancel()
    finally:
        await asyncio.to_thread(runtime.close)
    if service.is_hung:
        raise _HungError(service.failure)
    return None


def _load(choices: Sequence[SettingsChoice]) -> asyncio.Future[Runtime | str]:
    """Build the runtime on a thread of its own; the future holds it, or why there is none.

    A daemon thread: a signal while loading must not wait for the weights.
    """
    event_loop = asyncio.get_running_loop()
    future: asyncio.Future[Runtime | str] = event_loop.create_future()

    def settle(result: Runtime | str) -> None:
        if not future.done():
            future.set_result(result)

    def work() -> None:
        # Heavy imports (torch, transformers) come after the settings are known to be sound.
        from controller.runtime.wiring import StartupError, build_runtime

        result: Runtime | str
        try:
            with StartupProgress() as progress:
                (settings, tuned_for), *otherwise = choices
                result = build_runtime(settings, progress, tuned_for, otherwise)
        except StartupError as error:
            result = str(error)
        except BaseException as error:
            # A panic of a native library is no `Exception`; nobody else would end the wait.
            logging.getLogger("paceline").exception("cannot start")
            result = f"{type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):  # the event loop is gone: nobody waits any more
            event_loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=work, name="paceline-load", daemon=True).start()
    return future


def _app(runtime: Runtime) -> ASGIApp:
    from controller.api.app import create_app

    settings = runtime.settings
    key = settings.api_key
    return create_app(
        runtime.service,
        slo_classes=settings.slo_classes,
        default_class=settings.default_slo_class,
        lenient_slo=settings.is_lenient_slo,
        api_key=None if key is None else key.get_secret_value(),
        telemetry_reader=runtime.reader,
        metrics=runtime.metrics,
    )


async def _report_status(runtime: Runtime) -> None:
    """Print one line every ten seconds while there is something to tell."""
    _, previous = status_line(runtime, None)
    while True:
        await asyncio.sleep(_STATUS_INTERVAL_S)
        line, counts = status_line(runtime, previous)
        if counts != previous:
            print(line, flush=True)
        previous = counts
