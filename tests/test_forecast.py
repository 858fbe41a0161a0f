"""Predictions beside measurements: how they are made, and what is said of them."""

from dataclasses import replace

import pytest
from figures import assert_tidy, hatched_gaps, texts, title
from samples import make_predicted, make_record, make_records

from labkit import forecast
from labkit.forecast_findings import forecast_findings, forecast_ladder_findings
from labkit.forecast_plots import plot_forecast, plot_forecast_ladder
from labkit.forecast_words import (
    NOT_MADE,
    alt_forecast,
    alt_forecast_ladder,
    error_words,
    forecast_rows,
    forecast_table,
)
from labkit.predict.trace import TraceError
from labkit.recipe import ladder, profile_named
from labkit.report import Comparison

MIB = 2**20
STEPS = ladder(profile_named("tiny").recipe)


def predicted(slug="01_freeze_base", **options):
    return make_predicted(make_record(slug).comparison, **options)


def said(comparison):
    return " ".join(forecast_findings(comparison))


def test_both_steps_are_predicted_here_and_on_the_card(pairs):
    told = []
    found = forecast.forecast(
        STEPS["00_baseline"], STEPS["01_freeze_base"], pairs, "rtx4090", progress=told.append
    )
    assert found.missing == []
    here, card = found.predicted["here"], found.predicted["card"]
    assert here.after.recipe == card.after.recipe == STEPS["01_freeze_base"]
    assert here.peak_change_bytes < 0
    assert card.peak_change_bytes < 0
    assert card.after.machine["gpu"] == "rtx-4090"
    assert card.before.memory.timeline == []
    assert card.after.memory.timeline
    assert Comparison.from_dict(here.to_dict()) == here
    assert told == ["predicting for this machine", "predicting for NVIDIA RTX 4090 24GB"]


def test_an_unknown_card_is_a_sentence_and_the_machine_is_predicted(pairs):
    found = forecast.forecast(None, STEPS["00_baseline"], pairs, "voodoo")
    assert list(found.predicted) == ["here"]
    assert found.missing[0].startswith("No prediction for voodoo: GPU 'voodoo' is not in the")


@pytest.mark.parametrize(
    ("device", "sentence"),
    [("mps", "its device is mps, whose allocator"), ("cuda", "'Voodoo 3' is not in the cat")],
)
def test_a_machine_that_nothing_models_is_a_sentence(pairs, monkeypatch, device, sentence):
    monkeypatch.setattr(forecast, "default_device", lambda: device)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Voodoo 3")
    monkeypatch.setattr(forecast, "predict", lambda recipe, *_, **__: None)
    found = forecast.forecast(None, STEPS["00_baseline"], pairs, "t4")
    assert list(found.predicted) == ["card"]
    assert found.missing[0].startswith("No prediction for this machine: ")
    assert sentence in found.missing[0]


def test_a_step_that_cannot_be_traced_is_a_sentence(pairs, monkeypatch):
    def fail(*_, **__):
        raise TraceError("it depends on values.")

    monkeypatch.setattr(forecast, "predict", fail)
    found = forecast.forecast(None, STEPS["00_baseline"], pairs, "t4")
    assert found.predicted == {}
    assert found.missing == [
        "No prediction for this machine: it depends on values.",
        "No prediction for t4: it depends on values.",
    ]


@pytest.mark.parametrize(
    ("error", "compiled", "words"),
    [
        (0, False, "exact"),
        (-96, False, "−96 B"),
        (30 * MIB, False, "+30.0 MiB, +3.00\u00a0%"),
        (-MIB, True, "not compiled"),
        (None, False, "not measured"),
    ],
)
def test_an_error_in_a_few_words(error, compiled, words):
    assert error_words(error, 1000 * MIB, compiled=compiled) == words


def test_the_table_has_both_steps_the_verdict_and_where_it_comes_from():
    table = forecast_table(predicted().predicted)
    assert "| predicted | step before | this step | change |" in table
    assert "| peak here | 3.91 GiB | 2.93 GiB | −1,000.0 MiB (−25.0\u00a0%) |" in table
    assert "| does it fit | fits, 10.00 GiB to spare | fits, 10.00 GiB to spare |  |" in table
    assert "| time a step, modelled at best | 20.0 ms | 20.0 ms |  |" in table
    assert "predicted for NVIDIA RTX 4090 24GB, qwen3-small" in table
    assert "Worst batch: 32 pairs of 64 tokens; the longest." in table
    first = forecast_table(predicted("00_baseline").predicted)
    assert "| predicted | this step |\n" in first


def test_nothing_is_said_of_a_prediction_that_was_not_made():
    comparison = make_record().comparison
    assert forecast_findings(comparison) == []
    assert forecast_ladder_findings({"01_freeze_base": comparison}) == []
    assert forecast_rows({"01_freeze_base": comparison}) == f"In these records {NOT_MADE}."
    assert alt_forecast(comparison) == f"An empty figure: {NOT_MADE}."


def test_an_error_names_its_size_and_its_owner():
    assert "Predicted 2.93 GiB, measured the same, to the byte." in said(predicted())
    assert (
        "Predicted 2.99 GiB, measured 2.93 GiB: error +60.0 MiB (+2.00\u00a0%), most of it "
        "activations (+60.0 MiB)."
    ) in said(predicted(error_bytes=60 * MIB))
    assert "error −96 B (less than 0.01\u00a0%)" in said(predicted(error_bytes=-96))


def test_a_compiled_step_is_beside_the_prediction_of_the_step_without():
    text = said(predicted("05_compile", error_bytes=-3 * MIB))
    assert "for this step without compile; compiled, it measured 900.0 MiB, +3.0 MiB." in text
    assert "What compiling changes there is not predicted." in text
    assert "error" not in text


def test_the_card_says_what_it_would_do():
    text = said(predicted())
    assert (
        "On NVIDIA RTX 4090 24GB this step is predicted to hold 3.91 GiB and to reserve "
        "4.00 GiB: fits, 10.00 GiB to spare."
    ) in text
    assert "to change by −1,000.0 MiB (−20.0\u00a0%), in the same direction as here." in text


def test_a_step_that_does_nothing_here_may_do_something_there():
    amp = predicted("03_amp", card_change=-500, card_formats=("float32", "bfloat16"))
    assert (
        "There its peak is predicted to change by −500.0 MiB (−10.0\u00a0%), here it stayed, "
        "because products ran in float32 here and run in bfloat16 there."
    ) in said(amp)
    assert "to stay the same, as it does here." in said(predicted("03_amp", card_change=0))
    other_way = said(predicted(card_change=7))
    assert "+7.0 MiB (+0.1\u00a0%), here it was −1,000.0 MiB (−25.0\u00a0%)." in other_way


def test_scratch_memory_of_16_bits_is_named_where_it_is_an_error():
    comparison = predicted("03_amp", error_bytes=-MIB)
    comparison.predicted["here"].after.precision["autocast"] = "bfloat16"
    assert "scratch" not in said(comparison)  # what lacks are activations
    comparison.after.memory.by_owner["temporaries"] = MIB
    assert "products in 16 bits take scratch memory" in said(comparison)


def test_another_batch_than_the_worst_is_said():
    comparison = predicted()
    comparison.after.batch = comparison.after.batch | {"tokens": 60}
    assert "is another one than the worst, which was predicted." in said(comparison)


def test_a_step_out_of_memory_still_says_what_the_card_would_do():
    record = make_record(status="out_of_memory", memory=None, step_seconds=[])
    text = said(with_missing_step(record.comparison))
    assert text.startswith("On NVIDIA RTX 4090 24GB this step is predicted to hold")
    assert "There" not in text


def with_missing_step(comparison):
    """Predictions of a step that was not measured."""
    comparison.predicted = predicted().predicted
    return comparison


def test_the_ladder_sums_the_predictions_up():
    comparisons = {s: make_predicted(r.comparison) for s, r in make_records().items()}
    make_predicted(comparisons["04_accumulation"], error_bytes=-8 * MIB)
    text = " ".join(forecast_ladder_findings(comparisons))
    assert "Of 5 predicted peaks of steps that are not compiled, 4 are exact" in text
    assert "the largest error is −8.0 MiB, −1.00\u00a0% of the peak (04_accumulation)" in text
    assert "On NVIDIA RTX 4090 24GB, 8 of 8 steps are predicted to fit." in text
    del comparisons["03_amp"].predicted["card"]
    rows = forecast_rows(comparisons)
    assert "| 03_amp | 1.46 GiB | no prediction was made |" in rows
    assert "| 02_checkpointing | 1.46 GiB | 3.42 GiB | −1.46 GiB (−30.0\u00a0%) |" in rows


@pytest.mark.parametrize("slug", ["00_baseline", "01_freeze_base", "05_compile"])
def test_the_figure_of_a_step_is_tidy_and_holds_every_peak(slug):
    comparison = predicted(slug, error_bytes=-96)
    ax = plot_forecast(comparison)
    assert_tidy(ax.figure)
    assert len(ax.patches) == (3 if slug == "00_baseline" else 6)
    error = "(not compiled)" if slug == "05_compile" else "(−96 B)"
    assert error in texts(ax)
    assert "reserved" in texts(ax)
    assert "predicted for NVIDIA RTX 4090 24GB" in title(ax)
    assert alt_forecast(comparison).startswith("Bars of peak memory, measured on Abacus")


def test_a_figure_without_a_prediction_says_so():
    ax = plot_forecast(make_record().comparison)
    assert_tidy(ax.figure)
    assert title(ax).startswith("No prediction was made")
    assert len(ax.patches) == 2


def test_a_step_that_was_not_measured_is_a_gap_beside_its_prediction():
    record = make_record(status="out_of_memory", reason="too much", memory=None)
    comparison = with_missing_step(record.comparison)
    ax = plot_forecast(comparison)
    assert_tidy(ax.figure)
    assert len(hatched_gaps(ax)) == 1
    assert "out of memory: too much" in texts(ax)
    assert "measured here: out of memory: too much" in alt_forecast(comparison)


def test_the_figure_of_the_ladder_is_tidy_and_says_what_is_missing():
    comparisons = {s: make_predicted(r.comparison, -96) for s, r in make_records().items()}
    here, card = plot_forecast_ladder(comparisons)
    assert_tidy(here.figure)
    assert len(here.patches) == 16
    assert len(card.patches) == 8
    comparisons["03_amp"] = replace(comparisons["03_amp"], predicted={})
    here, card = plot_forecast_ladder(comparisons)
    assert_tidy(here.figure)
    assert NOT_MADE in texts(card)
    alt = alt_forecast_ladder(comparisons)
    assert "03_amp: no prediction was made" in alt
    assert "04_accumulation: predicted 800.0 MiB here, error: −96 B, predicted" in alt
