"""What a notebook calls, without a kernel."""

import json

import pytest
from samples import make_record

from labkit import cells, notebook
from labkit.exercises import Hint
from labkit.notebook import open_ladder, open_run
from labkit.plots import plot_peaks
from labkit.records import load_record, save_record


@pytest.fixture
def run(tmp_path):
    return open_run("01_freeze_base", profile="tiny", run_folder=str(tmp_path))


def test_opening_says_what_will_run(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(cells, "display", lambda markdown: shown.append(markdown.data))
    run = open_run("01_freeze_base", profile="tiny", run_folder=str(tmp_path))
    assert (run.before.train_base, run.after.train_base) == (True, False)
    assert "**01_freeze_base**, profile tiny: train_base: true → false" in shown[0]
    assert "Number formats: weights float32, autocast none" in shown[0]
    assert "synthetic pairs, 3,200 pairs; rows skipped: 0" in shown[0]


def test_a_step_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(Hint, match=r"no step 'nope'\. The steps are 00_baseline"):
        open_run("nope", run_folder=str(tmp_path))


@pytest.mark.parametrize("call", ["say", "comparison", "show", "check"])
def test_nothing_is_shown_before_it_is_measured(run, call):
    calls = {
        "say": run.say,
        "comparison": lambda: run.comparison,
        "show": lambda: run.show(plot_peaks),
        "check": lambda: run.check(3),
    }
    with pytest.raises(Hint, match=r"run the cell with run\.measure\(\) first"):
        calls[call]()


def test_a_guess_is_a_number(run):
    run.guess(300 * 2**20)
    run.guess(None)
    with pytest.raises(Hint, match="A guess is a number of bytes"):
        run.guess("300 MiB")


def test_measuring_keeps_a_record_and_figures_keep_their_text(run):
    result = run.measure()
    record = load_record(run.folder / "01_freeze_base.json")
    assert record.comparison.to_dict() == result.to_dict()
    assert record.key
    run.show(plot_peaks)
    alt = json.loads((run.folder / "figures" / "alt.json").read_text(encoding="utf-8"))
    assert list(alt) == ["01_freeze_base-peaks.png"]
    assert (run.folder / "figures" / "01_freeze_base-peaks.png").stat().st_size > 5000


def test_what_was_predicted_is_kept_and_held_against_what_was_measured(run, monkeypatch):
    run.predict("rtx-4090")
    assert list(run.predicted) == ["here", "card"]
    run.measure()
    record = load_record(run.folder / "01_freeze_base.json")
    assert record.comparison.predicted == run.predicted
    shown = []
    monkeypatch.setattr(cells, "display", lambda markdown: shown.append(markdown.data))
    run.say()
    assert "- Predicted 5.1 MiB, measured 5.1 MiB: error " in shown[0]
    assert "- On NVIDIA RTX 4090 24GB this step is predicted to hold" in shown[0]


def test_a_card_that_nobody_knows_does_not_stop_a_notebook(run):
    run.predict("voodoo")
    assert list(run.predicted) == ["here"]


def test_the_ladder_reads_the_newest_run_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr(notebook, "PROJECT", tmp_path)
    for name in ("older", "newer"):
        save_record(tmp_path / "runs" / name, make_record())
    assert open_ladder().folder.name == "newer"
    assert open_ladder(str(tmp_path / "runs" / "older")).folder.name == "older"
