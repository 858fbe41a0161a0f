"""``labkit predict``: what it answers, what it writes, and what it refuses."""

import base64
import json
from dataclasses import replace
from html import unescape

import pytest
from test_page import Links
from typer.testing import CliRunner

from labkit import captions, data
from labkit.cli import app
from labkit.predict.gpus import GPUS
from labkit.predict.prediction import predict as predict_recipe
from labkit.predicted_page import write_prediction
from labkit.recipe import Recipe
from labkit.report import Report
from labkit.summary import report_summary

TINY = ("--profile", "tiny", "--padding", "max")


def invoke(*arguments, **options):
    arguments = ["predict", *map(str, arguments)]
    return CliRunner().invoke(app, arguments, **options)


@pytest.fixture(scope="module")
def answer():
    """The JSON answer for a card; the command runs once."""
    return json.loads(invoke(*TINY, "--gpu", "t4", "--weights", "bfloat16", "--json").stdout)


@pytest.fixture(scope="module")
def report(answer):
    return Report.from_dict(answer)


@pytest.fixture
def predicted(monkeypatch, report):
    """Stands in for the predicting; holds what was asked for."""
    asked = {}

    def answer(recipe, gpu, **options):
        asked.update(options, recipe=recipe, gpu=gpu)
        return report

    monkeypatch.setattr("labkit.predict.prediction.predict", answer)
    return asked


def test_json_is_the_report_of_predict(answer, pairs):
    recipe = Recipe(
        model="qwen3-tiny", batch_size=8, max_length=32, padding="max", weights="bfloat16"
    )
    assert answer == json.loads(json.dumps(predict_recipe(recipe, "t4", pairs=pairs).to_dict()))
    assert answer["oracle"] == "predicted"
    assert (answer["batch"]["pairs"], answer["batch"]["tokens"]) == (8, 32)
    assert answer["step_seconds"] == []
    assert answer["fit"]["capacity_bytes"] == GPUS["t4"].memory_bytes


def test_owners_over_time_add_up_to_the_timeline(report):
    memory = report.memory
    totals = [sum(held) for held in zip(*memory.owner_timeline.values(), strict=True)]
    assert totals == [alive for alive, _ in memory.timeline]
    peak = totals.index(memory.peak_allocated_bytes)
    assert {o: curve[peak] for o, curve in memory.owner_timeline.items()} == memory.by_owner


def test_options_reach_the_prediction(predicted):
    invoke(*TINY, "--gpu", "A100 40GB", "--batch-size", 4, "--expandable-segments", "--emulate")
    assert predicted["recipe"].batch_size == 4
    assert predicted["gpu"] is GPUS["a100-40gb"]
    assert predicted["expandable_segments"]
    assert predicted["emulate"]
    assert len(predicted["pairs"]) == len(data.read_pairs())


def test_without_a_card_it_is_this_machine():
    document = json.loads(invoke(*TINY, "--json").stdout)
    assert document["machine"]["device"] == "cpu"
    assert document["fit"] is None
    assert document["modelled"] is None


def test_the_table_says_what_is_predicted_and_what_is_modelled(predicted, report):
    lines = invoke(*TINY, "--gpu", "t4").stdout.splitlines()
    assert lines[0].split() == ["Status", *captions.verdict_words(report).split()]
    assert lines[1].startswith("Source")
    assert "predicted for NVIDIA T4 16GB, qwen3-tiny" in lines[1]
    text = " ".join(" ".join(lines).split())
    assert "measured" not in text
    for line in (
        "Peak memory, predicted", "Peak reserved, predicted", "Outside the allocator",
        "Capacity of the card", "Worst batch", "Peak by phase, predicted",
        "Modelled time, at best", "Modelled speed, at best", "Who holds the peak, predicted",
    ):  # fmt: skip
        assert line in text
    assert "every batch is padded to max_length, 32" in text
    assert "float16 is used, because NVIDIA T4 16GB has no instructions" in text
    assert text.count("no instructions") == 1
    assert "cublas workspace" in text


def test_a_step_that_does_not_fit_is_an_answer(predicted, report, monkeypatch):
    monkeypatch.setattr(report.fit, "fits", False)
    monkeypatch.setattr(report.fit, "margin_bytes", -(2**30))
    monkeypatch.setattr(report.fit, "fails_in", "step 2, backward, model.layers.*.mlp")
    result = invoke(*TINY, "--gpu", "t4")
    assert result.exit_code == 0
    assert "does not fit, 1.00 GiB too little; first fails in step 2, backward" in result.stdout


@pytest.mark.parametrize(("encoding", "bar"), [("utf-8", "█" * 10), ("ascii", "#" * 10)])
def test_bars_are_written_in_what_the_terminal_has(predicted, encoding, bar):
    result = CliRunner(charset=encoding).invoke(app, ["predict", *TINY, "--gpu", "t4"])
    assert bar in result.stdout


def test_the_cards_are_listed():
    text = invoke("--list-gpus").stdout
    assert all(name in text for name in GPUS)
    assert "TF32" in text
    (row,) = (line for line in text.splitlines() if line.strip().startswith("t4 "))
    cells = ["t4", "14.75", "GiB", "142.0", "MiB", "320", "8.1", "-", "65", "-"]
    assert row.split()[: len(cells)] == cells
    assert "NVIDIA T4 datasheet" in row
    cards = json.loads(invoke("--list-gpus", "--json").stdout)["gpus"]
    assert [card["name"] for card in cards] == list(GPUS)
    assert cards[1]["matrix_flops_per_second"]["float16"] == 65e12


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu", "a100-50gb"], "near names: a100-80gb, a100-40gb"),
        (["--gpu", "A100"], "fits several: a100-40gb, a100-80gb"),
        (["--max-length", "99999"], "max_length 99999 is more than its"),
        (["--timeline", "step.pdf"], "--timeline writes .png or .html, not 'step.pdf'"),
        (["--timeline", "nowhere/step.png"], "there is no folder"),
        (["--attention", "flash_attention_2"], "predict with sdpa"),
        (["--data", "nothing.tsv"], "nothing.tsv"),
    ],
)
def test_an_expected_error_is_one_sentence(arguments, sentence):
    result = invoke(*TINY, *arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["step.pdf", "nowhere/step.png", "folder.html"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(predicted, tmp_path, name):
    (tmp_path / "folder.html").mkdir()
    assert invoke(*TINY, "--gpu", "t4", "--timeline", tmp_path / name).exit_code == 1
    assert predicted == {}


def test_the_figure_is_written(predicted, tmp_path):
    path = tmp_path / "step.PNG"
    result = invoke(*TINY, "--gpu", "t4", "--timeline", path, "--json")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert json.loads(result.stdout)["oracle"] == "predicted"
    assert str(path) in result.stderr


@pytest.fixture
def page(predicted, tmp_path):
    invoke(*TINY, "--gpu", "t4", "--timeline", tmp_path / "step.html")
    return (tmp_path / "step.html").read_text(encoding="utf-8")


def test_the_page_needs_nothing_beside_it(page):
    links = Links(page)
    assert links.targets
    assert all(target.startswith("data:") for target in links.targets)
    assert not {"script", "link", "iframe"} & links.tags
    assert "url(" not in page
    assert "http" not in page


def test_the_page_says_all_of_it_in_words(page, report):
    assert Links(page).alts == [captions.alt_owner_timeline(report)]
    text = unescape(page).replace("<wbr>", "")
    assert "predicted for NVIDIA T4 16GB, qwen3-tiny (tiny: not a result)" in text
    assert "measured" not in text
    summary = report_summary(report)
    assert all(words in text for name, words in summary.items() if name != "Status")
    assert "lora_targets</dt><dd>q_proj, k_proj, v_proj" in text
    assert "model.layers.*.self_attn" in text


def test_the_page_holds_the_report(page, answer):
    (document,) = (t for t in Links(page).targets if t.startswith("data:application/json"))
    assert json.loads(base64.b64decode(document.partition(",")[2])) == answer


def test_a_step_of_any_kind_has_a_page_too(report, tmp_path):
    bare = replace(report, recipe=None, batch={}, fit=None, modelled=None)
    bare = replace(bare, model={"name": "<b>my step</b>"})
    write_prediction(bare, tmp_path / "step.html")
    text = (tmp_path / "step.html").read_text(encoding="utf-8")
    assert "No verdict without a card" in text
    assert "&lt;b&gt;my step&lt;/b&gt;" in text
    assert "<h2>Recipe</h2>" not in text
