import json
import os
import subprocess
import sys
from dataclasses import fields

import pytest
from samples import make_record, make_records
from typer.testing import CliRunner

from labkit import measure, page, runner
from labkit.cli import app
from labkit.data import DataError
from labkit.execution import NotebookError
from labkit.recipe import PROFILES, Recipe
from labkit.records import load_records, save_record
from labkit.run_folder import RunnerError
from labkit.runner import NotebookResult, RunResult

COMMANDS = (
    ["run"], ["measure"], ["report"], ["predict"], ["validate"], ["data", "make"],
    ["data", "check"],
)  # fmt: skip
HEAVY = ("torch", "transformers", "peft", "papermill", "matplotlib", "nbconvert", "pandas")


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "load_references", lambda: [])
    for record in make_records().values():
        save_record(tmp_path, record)
    return tmp_path


@pytest.fixture
def measured(monkeypatch):
    """Stands in for the measuring; holds the recipe and the options that were asked for."""
    asked = {}

    def answer(recipe, pairs, **options):
        asked.update(options, recipe=recipe, pairs=len(pairs))
        options["progress"]("warm-up step 1")
        return make_record(**asked.get("report", {})).comparison.after

    monkeypatch.setattr(measure, "measure", answer)
    return asked


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"sentence1": "甲", "sentence2": "乙", "label": "1"}\n', encoding="utf-8")
    return path


@pytest.mark.parametrize("command", [[], *COMMANDS], ids=" ".join)
def test_help_has_examples_each_on_its_line(command):
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    lines = [line.strip() for line in result.output.splitlines()]
    examples = [
        line for line in lines[lines.index("Examples") :] if line.startswith("$ labkit")
    ]
    assert examples


def test_importing_the_command_line_imports_nothing_heavy():
    code = f"import sys, labkit.cli; print([m for m in {HEAVY} if m in sys.modules])"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout == "[]\n"


def test_every_recipe_field_is_an_option(measured, pairs):
    result = invoke(
        "measure", "--profile", "tiny", "--data", pairs, "--batch-size", 16, "--train-base",
        "--autocast", "bfloat16", "--lora-targets", "q_proj,k_proj", "--lora-targets", "o_proj",
        "--learning-rate", "0.01", "--timed-steps", 5, "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    recipe = measured["recipe"]
    assert recipe.model == PROFILES["tiny"].recipe.model
    assert (recipe.batch_size, recipe.train_base, recipe.autocast) == (16, True, "bfloat16")
    assert recipe.lora_targets == ("q_proj", "k_proj", "o_proj")
    assert recipe.learning_rate == 0.01
    assert (measured["timed_steps"], measured["device"], measured["pairs"]) == (5, "cpu", 1)
    text = invoke("measure", "--help").output.replace("…", "")
    assert all(f"--{f.name.replace('_', '-')}"[:16] in text for f in fields(Recipe))


def test_measure_without_options_is_the_profile(measured, pairs):
    invoke("measure", "--data", pairs)
    assert measured["recipe"] == PROFILES["small"].recipe
    assert measured["timed_steps"] == PROFILES["small"].timed_steps


def test_measure_prints_what_was_measured(measured, pairs):
    result = invoke("measure", "--data", pairs)
    assert "2.93 GiB" in result.stdout
    assert "measured on Abacus, 2 cores" in result.stdout
    assert "warm-up step 1" in result.stderr
    assert "warm-up step 1" not in result.stdout


def test_json_is_one_document_on_stdout(measured, pairs):
    document = json.loads(invoke("measure", "--data", pairs, "--json").stdout)
    assert document["memory"]["peak_allocated_bytes"] == 3000 * 2**20
    assert document["median_step_seconds"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("status", "exit_code"), [("out_of_memory", 0), ("skipped", 0), ("error", 1)]
)
def test_out_of_memory_is_an_answer_an_error_is_not(measured, pairs, status, exit_code):
    measured["report"] = {"status": status, "reason": "so it is", "memory": None}
    result = invoke("measure", "--data", pairs)
    assert result.exit_code == exit_code
    assert "so it is" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["measure", "--batch-size", "-3"], "batch_size must be"),
        (["measure", "--micro-batches", "64"], "micro_batches (64) is larger"),
        (["measure", "--autocast", "int3"], "autocast must be one of"),
        (["measure", "--data", "nothing.tsv"], "nothing.tsv"),
        (["measure", "--profile", "huge"], "profile must be one of"),
        (["run", "--profile", "huge"], "profile must be one of"),
        (["report", "nothing"], "There is no run in nothing"),
    ],
)
def test_an_expected_error_is_one_sentence(arguments, sentence):
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("error", [RunnerError, NotebookError, DataError, OSError])
def test_errors_of_a_run_are_one_sentence(monkeypatch, error):
    def fail(*_, **__):
        raise error("so it is")

    monkeypatch.setattr(runner, "run_course", fail)
    result = invoke("run")
    assert (result.exit_code, result.stderr) == (1, "labkit: so it is\n")


def test_a_bug_keeps_its_traceback(monkeypatch):
    def fail(*_, **__):
        raise ValueError("a bug")

    monkeypatch.setattr(runner, "run_course", fail)
    assert isinstance(invoke("run").exception, ValueError)


def test_ctrl_c_ends_with_130(monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_course", stop)
    assert invoke("run").exit_code == 130


@pytest.mark.parametrize(
    "arguments", [["--bogus"], ["run", "--bogus"], ["measure", "--seed", "x"]]
)
def test_a_wrong_command_line_ends_with_2(arguments):
    assert invoke(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("outcome", "exit_code"), [("ok", 0), ("error", 1), ("interrupted", 130)]
)
def test_run_shows_eight_rows_the_page_and_how_it_ended(
    run_folder, monkeypatch, outcome, exit_code
):
    result = RunResult(
        run_folder, [NotebookResult("03_amp", outcome)], run_folder / "index.html"
    )
    monkeypatch.setattr(runner, "run_course", lambda *_, **__: result)
    answer = invoke("run")
    assert answer.exit_code == exit_code
    assert all(slug in answer.stdout for slug in make_records())
    assert f"Page: {result.page}" in answer.stdout
    document = json.loads(invoke("run", "--json").stdout)
    assert document["notebooks"][0]["outcome"] == outcome
    assert len(document["rows"]) == 8


def test_report_renews_the_page(run_folder):
    answer = invoke("report", run_folder)
    assert answer.exit_code == 0
    assert "1.25× (1.25–1.25)" in answer.stdout
    assert (run_folder / "index.html").exists()
    assert invoke("report", run_folder, "--markdown").stdout.startswith("| Step | Change |")
    assert len(json.loads(invoke("report", run_folder, "--json").stdout)["rows"]) == 8


def test_report_keeps_a_reference(run_folder, monkeypatch, tmp_path_factory):
    from labkit import reference

    kept = tmp_path_factory.mktemp("kept")
    monkeypatch.setattr(reference.save_reference, "__defaults__", (kept,))
    assert invoke("report", run_folder, "--save-reference").exit_code == 0
    (saved,) = reference.load_references(kept)
    assert list(saved) == list(load_records(run_folder))


def test_version_is_printed():
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("labkit ")


def test_report_leaves_a_folder_alone_that_holds_no_run(tmp_path):
    page = tmp_path / "index.html"
    page.write_text("my own page", encoding="utf-8")
    result = invoke("report", tmp_path)
    assert result.exit_code == 1
    assert "There is no run in" in result.stderr
    assert page.read_text(encoding="utf-8") == "my own page"


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "cp936"])
def test_a_terminal_that_lacks_a_character_gets_a_question_mark(run_folder, encoding):
    code = f"from labkit.cli import app; app(['report', {str(run_folder)!r}])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"00_baseline" in done.stdout
