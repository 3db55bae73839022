"""`paceline tune` and `paceline profile`: from traffic to a profile that a server takes or not."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from controller.cli.main import app
from controller.config import Settings
from controller.tuning import job
from controller.tuning.profile import read_profile
from controller.tuning.space import DEFAULTS
from store.database import Database
from store.profiles import ProfileStore
from tests.controller.simulation.stored_runs import database, pool, twenty, unlearnt, write

TRAFFIC = "poisson:rate=800,duration=0.5,prompt=8,output=20,classes=chat:3/bulk:1"
PROMISES = ["--slo-class", "chat:ttft_ms=600,weight=2", "--slo-class", "bulk:ttft_ms=5000"]
QUICK = ["--generate", TRAFFIC, *PROMISES, "--knob", "max_running", "--seeds", "1",
         "--held-out-seeds", "2"]  # fmt: skip
OWNER = ["--model", "demo", "--device", "cpu (2 threads)"]


@pytest.fixture(autouse=True)
def url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"PACELINE_{name.upper()}", raising=False)
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path}/p.db"
    monkeypatch.setenv("PACELINE_DB", url)
    return url


def run(*words: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output + result.stderr
    assert "Traceback" not in result.output + result.stderr
    return result


def test_from_traffic_to_a_profile_that_a_server_takes(url: str, tmp_path: Path) -> None:
    result = run("tune", "mine", *QUICK, *OWNER, "--trials", "4")
    said = result.output
    assert "on a100-8b; trial 0 is what ships, with 128 seats" in result.stderr
    parts = r"1 scene of \d+ requests in 0\.\d+ s to tune, 2 scenes of \d+ to \d+ requests"
    assert re.search(parts, result.stderr)
    parts = r"4 trials over 1 knob, each up to \d+ simulated requests, in mine\.study; Ctrl-C"
    assert re.search(parts, result.stderr)
    assert " points on the tuning part: max_running " in result.stderr
    assert "4 trials: 4 whole" in result.stderr
    assert "one knob alone" in said
    assert "serve it with --profile mine" in said
    made = read_profile(tmp_path / "mine.yaml")
    verdict = made.judged.verdict
    assert f"{verdict}: {made.judged.statement}".split()[0] in said
    after, before = made.judged.after["attainment"], made.judged.before["attainment"]
    # More seats than the defaults have is what this traffic wants.
    assert made.settings.max_num_seqs > DEFAULTS.max_num_seqs
    assert verdict == "better"
    assert after.mean > before.mean
    assert made.provenance.num_trials == 4
    with ProfileStore.open_reader(url) as store:
        record = store.profile("mine")
        assert record is not None
        assert record.document == made.to_json()
        trials = store.trials(str(tmp_path / "mine.study"))
    assert [trial.trial_no for trial in trials] == [0, 1, 2, 3]
    assert trials[0].settings == DEFAULTS.to_json()

    assert "mine" in run("profile", "list").output
    (listed,) = json.loads(run("profile", "list", "--json").output)
    assert (listed["name"], listed["is_active"]) == ("mine", False)
    shown = run("profile", "show", "mine").output
    assert "profile mine, for demo on cpu (2 threads)" in shown
    assert "promises: chat (TTFT 600 ms, weight 2.0); bulk (TTFT 5000 ms)" in shown
    assert "many keep the machine busy" in shown
    assert json.loads(run("profile", "show", "mine", "--json").output) == made.to_json()
    assert run("profile", "export", "mine").output == (tmp_path / "mine.yaml").read_text()
    run("profile", "export", "mine", "--out", "copy.yaml")
    assert read_profile(tmp_path / "copy.yaml") == made

    shown = json.loads(run("serve", "--profile", "mine", "--print-settings").output)
    assert shown["max_num_seqs"] == made.settings.max_num_seqs
    assert json.loads(run("serve", "--print-settings").output)["profile"] is None
    run("profile", "activate", "mine")
    shown = json.loads(run("serve", "--print-settings").output)
    assert (shown["profile"], shown["max_num_seqs"]) == ("mine", made.settings.max_num_seqs)
    shown = json.loads(run("serve", "--max-num-seqs", "5", "--print-settings").output)
    assert (shown["profile"], shown["max_num_seqs"]) == ("mine", 5)
    shown = json.loads(run("serve", "--profile", "none", "--print-settings").output)
    assert shown["max_num_seqs"] == DEFAULTS.max_num_seqs
    shown = json.loads(run("serve", "./other", "--print-settings").output)
    assert shown["profile"] is None
    refused = run("serve", "./other", "--profile", "mine", code=2).stderr
    assert "belongs to model 'demo', this server's is './other'" in refused
    again = run("tune", "mine", *QUICK, *OWNER, "--trials", "4", "--out", "again.yaml")
    assert "the one it replaces was active" in again.stderr
    run("profile", "deactivate", "mine", code=1)
    run("profile", "activate", "mine")
    run("profile", "deactivate", "mine")
    assert json.loads(run("serve", "--print-settings").output)["profile"] is None


def test_the_same_command_twice_makes_the_same_profile_and_tries_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("tune", "a", *QUICK, "--trials", "2", "--study", "one")
    first = read_profile(tmp_path / "a.yaml")
    monkeypatch.setattr(job, "_try_next", None)
    run("tune", "a", *QUICK, "--trials", "2", "--study", "one")
    again = read_profile(tmp_path / "a.yaml")
    assert (again.settings, again.judged) == (first.settings, first.judged)


def test_what_is_replaced_is_told_and_what_is_no_profile_of_that_name_is_kept(
    tmp_path: Path,
) -> None:
    said = run("tune", "a", *QUICK, "--trials", "1").output
    assert "over the one" not in said
    assert "in place of" not in said
    said = " ".join(run("tune", "a", *QUICK, "--trials", "1").output.split())
    assert "wrote a.yaml over the one that was there" in said
    assert "profile 'a' is in the database in place of one that was unclear" in said
    for text in ("dear: diary\n", (tmp_path / "a.yaml").read_text()):
        (tmp_path / "b.yaml").write_text(text)
        refused = run("tune", "b", *QUICK, "--trials", "1", code=2).stderr
        assert "--out b.yaml: is there already, and no profile 'b'; name another" in refused
        assert (tmp_path / "b.yaml").read_text() == text


def test_studies_of_one_name_in_two_folders_keep_their_trials_apart(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, num_trials in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        run("tune", folder, *QUICK, "--trials", str(num_trials), "--study", "x.study")
    with ProfileStore.open_reader(url) as store:
        assert len(store.trials(str(tmp_path / "one" / "x.study"))) == 1
        assert len(store.trials(str(tmp_path / "two" / "x.study"))) == 2


def test_a_profile_of_nobody_is_made_and_said_to_be_useless_to_servers(tmp_path: Path) -> None:
    result = run("tune", "free", *QUICK, "--trials", "1")
    assert "--model and --device" in " ".join(result.stderr.split())
    assert "serve it" not in result.output
    assert "for no model and device: no server takes it" in run("profile", "show", "free").output
    refused = run("serve", "--profile", "free", "--print-settings", code=2).stderr
    assert "belongs to no model and device" in refused
    assert "belongs to no model" in run("profile", "activate", "free", code=2).stderr


def test_only_better_writes_nothing_that_is_not(tmp_path: Path) -> None:
    easy = ["--generate", "poisson:rate=2,duration=4,prompt=8,output=2,classes=chat:1"]
    result = run("tune", "x", *QUICK, *easy, "--trials", "2", "--only-better", code=1)
    assert "Nothing better than the shipped defaults" in " ".join(result.output.split())
    assert "x.yaml is not written" in result.stderr
    assert not (tmp_path / "x.yaml").exists()
    run("profile", "show", "x", code=2)


def test_an_interruption_says_how_to_go_on_and_keeps_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = job.__dict__["run_scene"], iter(range(100))

    def interrupted(*arguments: Any) -> Any:
        if next(count) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(job, "run_scene", interrupted)
        result = run("tune", "mine", *QUICK, "--trials", "3", code=130)
    assert "interrupted after 2 of 3 trials; mine.study keeps them" in result.stderr
    assert not (tmp_path / "mine.yaml").exists()
    again = run("tune", "mine", *QUICK, "--trials", "3").stderr
    assert "simulated requests, in mine.study, 2 of them done; Ctrl-C" in again
    assert read_profile(tmp_path / "mine.yaml").provenance.num_trials == 3
    other = run("tune", "mine", *QUICK, "--trials", "3", "--seed", "9", code=2).stderr
    assert "mine.study" in other
    assert "name another file" in other


def test_a_running_server_keeps_the_row_out_and_the_file_is_written(
    url: str, tmp_path: Path
) -> None:
    run("db", "upgrade")
    server = Database.open_writer(url)
    try:
        result = run("tune", "mine", *QUICK, *OWNER, "--trials", "1")
    finally:
        server.close()
    assert "not in the database" in result.stderr
    assert "paceline profile activate ./mine.yaml" in " ".join(result.stderr.split())
    said = run("profile", "activate", "./mine.yaml")
    assert "servers of demo on cpu (2 threads) start with mine" in said.output
    # One trial finds nothing, and whoever activates it is told.
    assert "Nothing better" in said.stderr
    assert json.loads(run("serve", "--print-settings").output)["profile"] == "mine"


def test_settings_that_differ_are_shown(tmp_path: Path) -> None:
    run("tune", "a", *QUICK, *OWNER, "--trials", "1")
    assert "no setting differs" in run("profile", "diff", "a").output
    text = (tmp_path / "a.yaml").read_text().replace("pace: 0.95", "pace: 0.75", 1)
    (tmp_path / "b.yaml").write_text(text.replace("name: a", "name: b", 1))
    changes = json.loads(run("profile", "diff", "./b.yaml", "a", "--json").output)
    assert changes == {"pace": {"a": 0.95, "./b.yaml": 0.75}}
    assert "0.75" in run("profile", "diff", "./b.yaml").output


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["a b", *QUICK], "name must be letters"),
        (["x"], "one of --trace, --generate and --run"),
        (["x", *QUICK, "--run", "latest"], "one of --trace, --generate and --run"),
        (["x", *QUICK, "--knob", "speed"], "'speed' is no knob; there are pace"),
        (["x", *QUICK, "--hardware", "abacus"], "abacus"),
        (["x", *QUICK, "--out", "no/such/x.yaml"], "no directory no/such"),
        (["x", *QUICK, "--study", "no/such/x"], "no directory no/such"),
        (["x", "--generate", "poisson:rat=1"], "rat is unknown"),
        (["x", "--generate", TRAFFIC], "'chat'"),
        (["x", "--trace", "nowhere.csv"], "nowhere.csv"),
        (["x", *QUICK, "--slo-class", "a:ttft=1"], "unknown key 'ttft'"),
        (["x", "--run", "latest"], "no database"),
        *(
            (["x", "--run", "latest", option, value], f"{option} does not apply to --run")
            for option, value in (
                ("--load", "2"),
                ("--mix", "a=1"),
                ("--slo-class", "a:ttft_ms=1"),
                ("--default-slo-class", "default"),
                ("--config", "x.toml"),
                ("--max-model-len", "9"),
                ("--start", "1"),
                ("--duration", "1"),
                ("--trace-format", "csv"),
            )
        ),
        (["x", *QUICK, "--held-out-share", "0.4"], "--held-out-share does not apply to --generate"),
        (["x", *QUICK, "--trace-format", "csv"], "--trace-format does not apply to --generate"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(words: list[str], names: str) -> None:
    result = run("tune", *words, code=2)
    (line,) = [line for line in result.stderr.splitlines() if "error" in line]
    assert line.startswith("paceline: error: ")
    assert names in line


def test_a_stored_run_makes_a_profile_of_its_server(tmp_path: Path) -> None:
    write(database(tmp_path), *twenty(), pool(), unlearnt())
    brief = ["--knob", "pace", "--trials", "1", "--seeds", "1", "--held-out-seeds", "1"]
    for word, more in (("last", []), ("latest", ["--max-requests", "19"])):
        run("tune", word, "--run", word, *brief, *more)
        made = read_profile(tmp_path / f"{word}.yaml")
        assert made.provenance.run == "run-a"
        assert made.provenance.hardware == "demo-cpu (2 threads)"
        assert {each["name"] for each in made.provenance.classes} == {"chat", "chat#2", "default"}
        assert made.tuned_for.refusal("demo", "cpu (2 threads)", "float32", "reference") is None


@pytest.mark.parametrize("option", ["--seeds", "--held-out-seeds"])
def test_more_seeds_than_memory_could_hold_are_refused(option: str) -> None:
    refused = run("tune", "x", *QUICK, option, "101", code=2).stderr
    assert f"'{option}'" in refused
    assert "100" in refused


def test_a_damaged_active_profile_is_told_and_stops_nobody_who_did_not_ask_for_it(url: str) -> None:
    run("tune", "mine", *QUICK, *OWNER, "--trials", "1")
    with ProfileStore.open_writer(url) as store:
        record = store.profile("mine")
        assert record is not None
        document = {**record.document, "settings": {"pase": 1}}
        store.save(replace(record, document=document, is_active=True))
    started = run("serve", "--print-settings")
    assert json.loads(started.stdout)["profile"] is None
    assert "warning: the active profile is left out: profile 'mine' in the" in started.stderr
    assert "settings.pase: no such setting" in started.stderr
    assert "settings.pase" in run("serve", "--profile", "mine", "--print-settings", code=2).stderr
    assert run("serve", "--profile", "none", "--print-settings").stderr == ""


def test_a_database_that_cannot_be_read_is_told(url: str, tmp_path: Path) -> None:
    assert run("serve", "--print-settings").stderr == ""
    (tmp_path / "p.db").write_text("dear diary, " * 99)
    started = run("serve", "--print-settings")
    assert "warning: the active profile is left out: cannot read" in started.stderr
    assert json.loads(started.stdout)["profile"] is None


def test_a_profile_is_for_the_weights_that_it_was_tuned_for_whatever_they_are_called(
    tmp_path: Path,
) -> None:
    run("tune", "mine", *QUICK, *OWNER, "--trials", "1")
    other = ["serve", "./other", "--served-model-name", "demo", "--print-settings"]
    refused = run(*other, "--profile", "mine.yaml", code=2).stderr
    assert "belongs to model source 'demo', this server's is './other'" in refused
    run("profile", "activate", "mine")
    started = run(*other)
    assert "left out: profile 'mine' belongs to model source 'demo'" in started.stderr
    assert json.loads(started.stdout)["profile"] is None
    run("tune", "its", *QUICK, *OWNER, "--source", "./other", "--trials", "1")
    assert read_profile(tmp_path / "its.yaml").tuned_for.source == "./other"
    assert json.loads(run(*other, "--profile", "its").stdout)["profile"] == "its"


def test_a_profile_under_another_policy_is_told_to_mean_little(tmp_path: Path) -> None:
    run("tune", "mine", *QUICK, *OWNER, "--trials", "1")
    served = ["serve", "--profile", "mine", "--print-settings"]
    assert "warning" not in run(*served).stderr
    said = run(*served, "--policy", "static").stderr
    assert "profile 'mine' was tuned for --policy slo; under 'static' most of its" in said


def test_an_interruption_of_the_first_trial_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "run_scene", interrupted)
    result = run("tune", "mine", *QUICK, "--trials", "3", code=130)
    assert "the same command goes on" in result.stderr


def test_profiles_that_are_not_there_or_not_usable(tmp_path: Path) -> None:
    assert "no database" in run("profile", "list", code=2).stderr
    run("db", "upgrade")
    assert "`paceline tune` makes them" in run("profile", "list", code=1).stderr
    assert "no profile 'x' in the database" in run("profile", "show", "x", code=1).stderr
    assert "not active" in run("profile", "deactivate", "x", code=1).stderr
    (tmp_path / "bad.yaml").write_text("format: 1\n")
    assert "name is missing" in run("profile", "activate", "bad.yaml", code=2).stderr
    assert "no profile 'x'" in run("serve", "--profile", "x", code=2).stderr
    assert "No such file" in run("serve", "--profile", "./x.yaml", code=2).stderr


@pytest.mark.parametrize("words", [["tune", "--help"], ["profile", "--help"]])
def test_help_names_the_ways_to_go_on(words: list[str]) -> None:
    text = run(*words).output
    assert ("--generate" in text) == (words[0] == "tune")
    assert ("activate" in text) == (words[0] == "profile")
