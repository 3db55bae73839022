"""Guards of the layout and of the docs: what a reviewer would otherwise have to remember.

Everything is derived from the tree, so a new file, option, setting, header, metric or error code is
guarded on the day it appears.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("engine", "costmodel", "store", "controller")
MAX_LINES = 400
SOURCES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
MIGRATIONS = sorted((ROOT / "alembic").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
CLOCK_FILE = ROOT / "engine" / "clock.py"
CLOCK_READERS = {
    "time": frozenset(
        f"{name}{suffix}"
        for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
        for suffix in ("", "_ns")
    ),
    "datetime": frozenset({"now", "utcnow", "today"}),
    "date": frozenset({"today"}),
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parametrize_files(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=relative)


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def docs() -> str:
    """All prose that an operator or a client reads."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages if page.exists())


def is_documented(word: str) -> bool:
    """Whether `word` stands in the docs by itself, not as a part of a longer name."""
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", docs()) is not None


def undocumented(words: set[str]) -> list[str]:
    return sorted(word for word in words if not is_documented(word))


def string_constants(path: Path) -> Iterator[str]:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def run_python(code: str) -> str:
    """Run `code` in a fresh interpreter at the repo root and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Files


@parametrize_files(SOURCES + MIGRATIONS + TESTS)
def test_a_file_over_400_lines_is_two_files(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@parametrize_files(SOURCES + MIGRATIONS)
def test_a_module_opens_with_what_it_owns(path: Path) -> None:
    assert ast.get_docstring(parse(path))


def test_no_compiled_module_lies_beside_its_source() -> None:
    # It would be imported instead, and tests would measure what the source was once.
    folders = ("controller", "costmodel", "engine", "store")
    assert not [relative(path) for each in folders for path in (ROOT / each).rglob("*.so")]


def test_the_alembic_folder_is_no_package() -> None:
    # With `alembic/__init__.py` (or one in `versions/`), `import alembic`, `python -m alembic` and
    # `python -m pytest` from the repo root pick up this folder instead of the library. The
    # `alembic` console script still works, which hides the bug.
    found = [relative(path) for path in (ROOT / "alembic").rglob("__init__.py")]
    assert found == []


def test_alembic_is_the_library_even_from_the_repo_root() -> None:
    origin = Path(run_python("import alembic; print(alembic.__file__)").strip())
    assert origin.parent != ROOT / "alembic"
    assert (origin.parent / "script").is_dir()


def test_the_tests_are_no_packages() -> None:
    # With `tests/engine/__init__.py`, `import engine` can mean the tests of the engine.
    found = [relative(path) for path in (ROOT / "tests").rglob("__init__.py")]
    assert found == []


@pytest.mark.parametrize("name", PACKAGES)
def test_the_four_names_are_this_tree(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == ROOT / name / "__init__.py"


def test_there_are_no_other_top_level_packages() -> None:
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found == set(PACKAGES)


def test_migrations_are_one_numbered_line() -> None:
    code = (
        "from alembic.config import Config; from alembic.script import ScriptDirectory\n"
        "script = ScriptDirectory.from_config(Config(toml_file='pyproject.toml'))\n"
        "print(len(script.get_heads()), *[r.revision for r in script.walk_revisions()][::-1])"
    )
    num_heads, *revisions = run_python(code).split()
    assert num_heads == "1"
    assert revisions == [f"{number:04d}" for number in range(1, len(revisions) + 1)]


# Floors


def test_the_floors_hold() -> None:
    code = (
        "import sys; from importlinter.cli import lint_imports\n"
        "sys.exit(lint_imports(config_filename='pyproject.toml', cache_dir=None))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def clock_readings(tree: ast.Module) -> list[str]:
    """Return every use of an imported clock in a module, as `line: name`."""
    modules: dict[str, str] = {}
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {(a.asname or a.name): a.name for a in node.names if a.name in CLOCK_READERS}
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [
                (node.lineno, f"time.{a.name}")
                for a in node.names
                if a.name in CLOCK_READERS["time"]
            ]
        elif isinstance(node, ast.ImportFrom) and node.module == "datetime":
            modules |= {(a.asname or a.name): a.name for a in node.names if a.name in CLOCK_READERS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            # `time.time`, `datetime.now`, and `datetime.datetime.now`.
            name = (
                modules.get(owner.id)
                if isinstance(owner, ast.Name)
                else owner.attr
                if isinstance(owner, ast.Attribute)
                else None
            )
            if name in CLOCK_READERS and node.attr in CLOCK_READERS[name]:
                found.append((node.lineno, f"{name}.{node.attr}"))
    return [f"{line}: {name}" for line, name in sorted(found)]


@parametrize_files([path for path in SOURCES if path != CLOCK_FILE])
def test_nothing_but_the_clock_reads_a_clock(path: Path) -> None:
    assert clock_readings(parse(path)) == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import time\nx = time.monotonic()", ["2: time.monotonic"]),
        ("import time as t\nf = t.perf_counter_ns", ["2: time.perf_counter_ns"]),
        ("from time import time", ["1: time.time"]),
        ("import datetime\ndatetime.datetime.now()", ["2: datetime.now"]),
        ("from datetime import datetime as dt\ndt.utcnow()", ["2: datetime.utcnow"]),
        ("import time\ntime.sleep(1)\nclock.now()\nrecord.time.start", []),
    ],
)
def test_the_clock_guard_sees_every_spelling(code: str, expected: list[str]) -> None:
    assert clock_readings(ast.parse(code)) == expected


@pytest.mark.parametrize("words", ["", "telemetry", "bench spike", "serve", "tune", "profile"])
def test_help_does_not_import_torch(words: str) -> None:
    arguments = [*words.split(), "--help"]
    code = (
        "import sys; from controller.cli.main import main\n"
        f"sys.argv = ['paceline', *{arguments!r}]\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "print('HEAVY', [m for m in ('torch', 'transformers', 'sklearn') if m in sys.modules])"
    )
    assert run_python(code).splitlines()[-1] == "HEAVY []"


# Docs


def commands() -> dict[str, set[str]]:
    """Every command of `paceline` with its long options."""
    from controller.cli.main import app

    found: dict[str, set[str]] = {}

    def visit(command: typing.Any, path: str) -> None:
        options = {
            word
            for parameter in command.params
            for word in (*parameter.opts, *parameter.secondary_opts)
            if word.startswith("--")
        }
        found[path] = options - {"--help", "--install-completion", "--show-completion"}
        for name, child in getattr(command, "commands", {}).items():
            visit(child, f"{path} {name}")

    visit(typer.main.get_command(app), "paceline")
    return found


def test_every_command_and_option_is_documented() -> None:
    found = commands()
    assert "paceline bench spike" in found
    assert undocumented(set(found)) == []
    assert undocumented(set().union(*found.values())) == []


def environment_names() -> set[str]:
    """Every PACELINE_* variable: one per setting, and those that the code names itself."""
    from controller.config import Settings

    names = set()
    for name, field in Settings.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            names |= {f"PACELINE_{name}__{part.name}".upper() for part in dataclasses.fields(kind)}
        else:
            names.add(f"PACELINE_{name}".upper())
    literal = re.compile(r"PACELINE_[A-Z_]*[A-Z]")
    for path in SOURCES + MIGRATIONS:
        for text in string_constants(path):
            names |= {text} if literal.fullmatch(text) else set()
    return names


def test_every_setting_is_documented() -> None:
    names = environment_names()
    assert "PACELINE_PORT" in names
    assert undocumented(names) == []


def header_names() -> set[str]:
    """Every header that the HTTP door reads or sends, apart from those of HTTP itself."""
    from controller.api.headers import HEADER_CHANNELS

    pattern = re.compile(r"x-[a-z0-9-]*[a-z0-9]|retry-after(-ms)?|server-timing")
    names = {name for channel in HEADER_CHANNELS for name in channel.values()}
    for path in (ROOT / "controller" / "api").rglob("*.py"):
        names |= {text for text in string_constants(path) if pattern.fullmatch(text)}
    return names


def test_every_header_is_documented() -> None:
    names = header_names()
    assert {"x-slo-tpot-ms", "x-slo-decision", "retry-after-ms"} <= names
    assert undocumented(names) == []


def exported_metrics() -> set[str]:
    """Every metric as a scrape shows it: a counter ends in `_total`."""
    from controller.runtime.metrics import Metrics

    counts = types.SimpleNamespace(num_rows_queued=0, num_dropped_by_reason={})
    metrics = Metrics("demo", block_size=16, num_blocks=1, telemetry_counts=lambda: counts)
    return {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in metrics.registry.collect()
    }


def metrics_in_the_source() -> set[str]:
    """Every metric name in the code, so that one that is exported only sometimes is seen too."""
    pattern = re.compile(r"(paceline_[a-z0-9_]+|vllm:[a-z0-9_]+)")
    return {
        text
        for path in (ROOT / "controller").rglob("*.py")
        for text in string_constants(path)
        if pattern.fullmatch(text)
    }


def test_every_metric_is_documented() -> None:
    exported = exported_metrics()
    assert {"vllm:num_requests_running", "vllm:prompt_tokens_total"} <= exported
    assert undocumented(exported) == []
    written = metrics_in_the_source()
    assert sorted(n for n in written if undocumented({n}) and undocumented({f"{n}_total"})) == []


def test_every_error_code_is_documented() -> None:
    from controller.api.errors import ERROR_CODES

    assert undocumented(set(ERROR_CODES)) == []


def test_every_raised_error_code_is_in_the_table() -> None:
    from controller.api.errors import ERROR_CODES

    raised = set()
    for path in (ROOT / "controller" / "api").rglob("*.py"):
        for node in ast.walk(parse(path)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            codes = [k.value for k in node.keywords if k.arg == "code"]
            if node.func.id == "ApiError":
                codes += node.args[1:2]
            elif node.func.id != "invalid":
                continue
            raised |= {c.value for c in codes if isinstance(c, ast.Constant)}
    assert raised
    assert raised <= set(ERROR_CODES)


def test_every_file_has_its_caption() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    missing = [
        relative(path)
        for path in SOURCES
        if path.name != "__init__.py" and f"`{relative(path)}`" not in page
    ]
    assert missing == []


def test_every_file_of_the_map_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(rf"`((?:{'|'.join(PACKAGES)}|alembic|tests)/[\w/]+\.py)`", page)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_link_between_pages_leads_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    links = [
        (page, target)
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
        if "://" not in target
    ]
    assert links
    broken = [
        f"{relative(page)}: {link}" for page, link in links if not (page.parent / link).exists()
    ]
    assert broken == []
