import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from labkit import cli_tune, tuning
from labkit.cli import app
from labkit.cli_tune_output import Lines, live_table, row_words
from labkit.recipe import PROFILES, Recipe
from labkit.tuning import tune
from labkit.tuning_forecast import Forecast
from labkit.tuning_proof import NotExact
from labkit.tuning_record import Row, Tuning

ONE_STAGE = (
    "--profile", "tiny", "--padding", "longest", "--weights", "float32", "--autocast", "none",
    "--compile", "none", "--num-workers", 0, "--threads", 0, "--checkpoint-every", 0,
    "--micro-batches", 1, "--rounds", 3, "--device", "cpu",
)  # fmt: skip


def invoke(*arguments):
    return CliRunner().invoke(app, ["tune", *(str(argument) for argument in arguments)])


def made(recipe=PROFILES["tiny"].recipe, **fields):
    """A tuning that found a recipe without measuring anything."""
    return Tuning(recipe, frozenset(), 2**30, 2**31, 100, 3, recipe=recipe, **fields)


def test_help_has_examples_and_every_option():
    text = invoke("--help").output
    assert "$ labkit tune --data pairs.tsv" in text
    for option in ("--budget", "--steps", "--rounds", "--out", "--json", "--recipe", "--seed"):
        assert option in text


def test_a_tuned_recipe_is_written_read_back_and_measured(tmp_path):
    path = tmp_path / "tuned recipe.json"
    result = invoke(*ONE_STAGE, "--out", path)
    assert result.exit_code == 0, result.output
    assert "optimizer and loader | as given" in result.stderr or "to begin" in result.stderr
    assert "| racing | " in result.stderr
    for words in (
        "Tuned: ", "given", "tuned", "Measured peak", "Real tokens/s", "as fast (quartiles",
        "The same, in float32", f"Recipe: {path}", f"labkit train --recipe '{path}'",
    ):  # fmt: skip
        assert words in result.stdout
    tuned = Recipe.from_dict(json.loads(path.read_text(encoding="utf-8")))
    given = PROFILES["tiny"].recipe
    changed = {"optimizer": "adamw", "cached": False, "fast_dropout": False}
    assert replace(tuned, **changed) == given  # whichever of them the race has kept
    record = json.loads((tmp_path / "tuned recipe.record.json").read_text(encoding="utf-8"))
    assert record["format"] == "labkit tuning 1"
    assert record["recipe"] == tuned.to_dict()
    assert record["machine"]["versions"]["torch"]
    assert all(len(row["report"]["step_seconds"]) >= 3 for row in record["rows"])
    measured = CliRunner().invoke(
        app,
        ["measure", "--recipe", str(path), "--timed-steps", "3", "--device", "cpu", "--json"],
    )
    assert measured.exit_code == 0, measured.output
    assert json.loads(measured.stdout)["recipe"] == tuned.to_dict()


def test_json_is_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "prove", lambda search: None)
    path = tmp_path / "tuned.json"
    result = invoke(*ONE_STAGE, "--optimizer", "adamw", "--out", path, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["path"] == str(path)
    assert document["record"] == str(tmp_path / "tuned.record.json")
    assert document["rows"] == []
    assert document["recipe"]["cached"] is True
    assert "optimizer" in document["fixed"]


@pytest.mark.parametrize(("options", "words"), [
    (("--budget", "lots"), "budget must be a number of bytes"),
    (("--budget", "10000GiB"), "are free: ask for less"),
    (("--budget", "1KiB"), "nothing fits into 1.0 KiB: the least that was found is"),
    (("--out", "tuned.yaml"), "--out writes .json, not 'tuned.yaml'"),
    (("--data", "none-such.tsv"), "none-such.tsv"),
])  # fmt: skip
def test_what_cannot_be_tuned_is_one_sentence(options, words):
    result = invoke(*ONE_STAGE, *options)
    assert result.exit_code == 1
    assert words in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("labkit: ")
    assert "Traceback" not in result.output


def test_ctrl_c_writes_the_best_so_far_and_exits_with_130(tmp_path, monkeypatch):
    path = tmp_path / "tuned.json"
    monkeypatch.setattr(tuning, "tune", lambda *_, **__: made(interrupted=True))
    result = invoke(*ONE_STAGE, "--out", path)
    assert result.exit_code == 130
    assert result.stderr.splitlines() == [
        f"Stopped: the best so far, not checked, is in {path}"
    ]
    assert Recipe.from_dict(json.loads(path.read_text(encoding="utf-8")))
    assert json.loads((tmp_path / "tuned.record.json").read_text(encoding="utf-8"))[
        "interrupted"
    ]


def test_ctrl_c_before_a_recipe_is_found_writes_nothing(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Forecast, "peak_bytes", stop)
    result = invoke(*ONE_STAGE, "--out", tmp_path / "tuned.json")
    assert result.exit_code == 130
    assert result.stderr == "Stopped before a recipe was found; nothing is written.\n"
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_that_is_not_exact_leaves_its_record_only(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise NotExact("it computes something else", made())

    monkeypatch.setattr(tuning, "tune", fail)
    result = invoke(*ONE_STAGE, "--out", tmp_path / "tuned.json")
    assert result.exit_code == 1
    assert "labkit: it computes something else" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tuned.record.json"]


def test_without_a_name_it_is_named_after_model_batch_and_length():
    path = cli_tune.default_path(Recipe(model="Qwen/Qwen3-Embedding-0.6B", batch_size=16))
    assert path.parts[-3:] == ("runs", "tuned", "Qwen3-Embedding-0.6B-16-pairs-of-64.json")
    assert cli_tune.default_path(Recipe(model="a/config.json")).name.startswith("config-32")


def rows():
    recipe = PROFILES["tiny"].recipe
    racing = Row("compile", recipe, "compile: [none]", 2**20, status="racing")
    racing.report = {
        "step_seconds": [0.5, 0.7, 0.6], "data_seconds": [0.0] * 3,
        "compile": {"first_step_seconds": 40.0, "graphs": 1},
    }  # fmt: skip
    racing.speed_to_leader, racing.pays_after_steps = 1.0, 1234.5
    pruned = Row("compile", recipe, "weights", 2**31, status="pruned", reason="over the budget")
    return [racing, pruned]


def test_a_row_in_words():
    racing, pruned = (list(row_words(row).values()) for row in rows())
    assert racing[2:5] == ["1.0 MiB", "600.0 ms", "1.00×"]
    assert racing[5] == "racing; first step 40.00 s, pays after 1,234"
    shared = rows()[0]
    shared.report["compile"]["graphs"] = 0
    assert row_words(shared)["Status"] == "racing"
    assert pruned[2:] == ["2.00 GiB", "", "", "pruned: over the budget"]


def test_the_table_of_a_terminal_shows_all_rows_and_what_is_done():
    out = Console(file=io.StringIO(), width=150)
    out.print(live_table(made(rows=rows(), doing="compile: [racing]")))
    text = out.file.getvalue()
    for words in ("Budget 1.00 GiB", "compile: [none]", "over the budget", "compile: [racing]"):
        assert words in text


def test_of_stages_that_are_over_the_table_shows_winners_until_the_end():
    def text(doing):
        earlier = [replace(row, stage="padding") for row in rows()]
        earlier[0].status = "winner"
        out = Console(file=io.StringIO(), width=150)
        out.print(live_table(made(rows=[*earlier, *rows()], doing=doing)))
        return out.file.getvalue()

    assert text("compile: racing").count("over the budget") == 1
    assert text("done").count("over the budget") == 2


def test_lines_say_each_change_of_a_status_once():
    said, found = [], made(rows=rows())
    lines = Lines(said.append)
    lines(found)
    lines(found)
    found.rows[0].status = "winner"
    lines(found)
    statuses = [re.split("[;:]", line.split(" | ")[2])[0] for line in said]
    assert statuses == ["racing", "pruned", "winner"]
    assert said[0].endswith("pays after 1,234 | 1.0 MiB, 600.0 ms, 1.00×")
    assert said[1] == "compile | weights | pruned: over the budget | 2.00 GiB"


def test_the_api_needs_no_terminal(pairs, monkeypatch):
    monkeypatch.setattr(tuning, "prove", lambda search: None)
    fixed = {"padding", "weights", "autocast", "optimizer", "num_workers", "threads", "compile"}
    fixed |= {"checkpoint_every", "micro_batches"}
    found = tune(PROFILES["tiny"].recipe, pairs, fixed=fixed, device="cpu")
    assert found.rows == []
    assert found.recipe == replace(PROFILES["tiny"].recipe, cached=True, fast_dropout=True)
