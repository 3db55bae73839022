"""`make wheel`: the step path compiled, and still the same code.

The wheel is built once, from a copy of the sources, and installed into a folder of its own; what is
asked of it runs in processes that see that folder and nothing of the working tree.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from controller.policy.policies import POLICY_NAMES
from controller.simulation.hardware import BUILT_IN
from controller.simulation.run import LEARNERS, SimulationConfig, simulate
from tests.controller.simulation.test_run import CONFIG, crowd

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("alembic", "controller", "costmodel", "docs", "engine", "store", "tests")
FILES = ("Makefile", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml")
NEEDS = {
    "a C compiler": shutil.which("cc") is not None,
    "make": shutil.which("make") is not None,
    "hatch-mypyc": importlib.util.find_spec("hatch_mypyc") is not None,
}
missing = ", ".join(name for name, is_there in NEEDS.items() if not is_there)
pytestmark = pytest.mark.skipif(bool(missing), reason=f"needs {missing}")

POLICIES = [name.replace("-N", "-384") for name in POLICY_NAMES]
# Suites that hold the compiled code to what the sources are held to. The others replace parts of a
# class, or count lines, which compiled code has none of.
SUITES = (
    "tests/controller/policy",
    "tests/costmodel/test_conformance.py",
    "tests/costmodel/test_snapshot.py",
    "tests/engine/test_blocks.py",
    "tests/engine/test_isolation.py",
    "tests/engine/test_loop.py",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel was installed into; the copy of the sources lies beside it."""
    folder = tmp_path_factory.mktemp("wheel")
    copy, target = folder / "copy", folder / "installed"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in FILES:
        shutil.copy2(ROOT / name, copy / name)
    venv = sys.prefix
    make = ["make", "wheel", f"VENV={venv}", "-o", f"{venv}/.dev"]
    _run(make, copy, {})
    (wheel,) = (copy / "dist").glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--no-deps", "--target", str(target), str(wheel)], folder, {})
    return target


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    full = {**os.environ, **environment}
    done = subprocess.run(
        command, cwd=folder, env=full, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def _ask(installed: Path, code: str) -> object:
    """Run code that prints JSON, beside a copy of the tests, on the compiled modules."""
    found = _run(
        [sys.executable, "-c", code],
        installed.parent,
        {"PYTHONPATH": os.pathsep.join([str(installed), str(_tests(installed))])},
    )
    return json.loads(found)


def _tests(installed: Path) -> Path:
    """A folder that holds the tests and what they read, and no package of ours."""
    folder = installed.parent / "beside"
    if not folder.exists():
        for name in ("tests", "docs"):
            shutil.copytree(installed.parent / "copy" / name, folder / name)
        # The working tree's own settings would put the sources first.
        (folder / "pytest.ini").write_text(
            "[pytest]\naddopts = --import-mode=importlib\npythonpath = .\nfilterwarnings = error\n"
        )
    return folder


def test_the_step_path_is_compiled_and_the_working_tree_is_left_alone(installed: Path) -> None:
    names = [
        "controller.policy.judging", "controller.policy.planner", "costmodel.envelope",
        "costmodel.recursive", "engine.loop", "controller.runtime.feedback",
        "controller.policy.promise", "controller.policy.steady", "controller.simulation.recorder",
    ]  # fmt: skip
    code = (
        "import importlib, json\n"
        f"print(json.dumps([importlib.import_module(name).__file__ for name in {names}]))"
    )
    files = _ask(installed, code)
    assert isinstance(files, list)
    assert all(file.startswith(str(installed)) and file.endswith(".so") for file in files), files
    assert not list((installed.parent / "copy").rglob("*.so"))


def test_the_same_decisions_to_the_last_bit(installed: Path) -> None:
    code = (
        "import json\n"
        "from tests.test_wheel import hashes\n"
        "print(json.dumps(hashes()))"
    )  # fmt: skip
    assert _ask(installed, code) == hashes()


def hashes() -> dict[str, str]:
    """Event hashes of every policy and learner, in a crowd that not all of it can be served in."""
    workload = crowd(120, 0.02)
    found = {}
    for machine in ("a100-8b", "h100-70b"):
        for name in POLICIES:
            result = simulate(workload, name, BUILT_IN[machine], CONFIG)
            found[f"{machine} {name}"] = result.event_hash
    for learner in LEARNERS:
        config = SimulationConfig(classes=CONFIG.classes, learner=learner)
        result = simulate(workload, "slo", BUILT_IN["a100-8b"], config)
        found[learner] = result.event_hash
    return found


def test_simulations_still_travel_between_processes(installed: Path) -> None:
    code = "import sys; from controller.cli.main import main; sys.exit(main())"
    command = [
        sys.executable, "-c", code, "simulate", "--generate", "poisson:rate=5,duration=4",
        "--policy", "slo", "--policy", "fcfs-256", "--workers", "2", "--out", "out",
    ]  # fmt: skip
    parts = [*command[:6], "--policy", "slo", "--parts", "2", "--workers", "2"]
    _run(command, installed.parent, {"PYTHONPATH": str(installed)})
    _run(parts, installed.parent, {"PYTHONPATH": str(installed)})
    lines = (installed.parent / "out" / "results.jsonl").read_text().splitlines()
    assert len(lines) == 2


def test_the_suites_of_the_step_path_pass_on_the_wheel(installed: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SUITES]
    printed = _run(command, _tests(installed), {"PYTHONPATH": str(installed)})
    assert " passed" in printed
