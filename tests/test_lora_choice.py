"""Notebook 08: gradients against autograd by hand, counts by formula, words and figures."""

import json
from dataclasses import replace
from itertools import islice
from math import sqrt

import pytest
import torch
from figures import assert_tidy, texts
from samples import MACHINE, make_report
from solutions import lora_parameters

from labkit.exercises import UNANSWERED, Hint, WrongAnswer
from labkit.gradients import GradientNorm, by_kind, gradient_norms, linear_layers, ratio
from labkit.lora_candidates import (
    ARTICLE_CHOICE,
    Choice,
    LoraStudy,
    candidates,
    gain,
    outline,
    take_out_lora,
    with_rank,
)
from labkit.lora_choice import open_lora_choice
from labkit.lora_exercise import check_parameters
from labkit.lora_plots import multiples, plot_gradients, plot_lora_costs, plot_lora_quality
from labkit.lora_tables import found_table, layers_table, predicted_table
from labkit.lora_words import (
    alt_gradients,
    alt_lora_costs,
    alt_lora_quality,
    article_words,
    difference_words,
    findings,
)
from labkit.recipe import Recipe, differences
from labkit.report import Comparison
from labkit.trainable import trainable_parameters

KINDS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MINI = Recipe(model="qwen3-mini")
PACKED = {"padding": "none", "last_token_only": True}


def norm(kind, *whole, layer=0, parameters=4):
    return GradientNorm(layer, kind, parameters, whole, whole)


def make_study(macro_f1=None, profile="small"):
    """A study of every choice, as the notebook leaves one."""
    macro_f1 = macro_f1 or {}
    norms = [norm(kind, 2.0 + i, 2.1 + i) for i, kind in enumerate(KINDS)]
    study = LoraStudy(profile, KINDS, training_steps=12, held_out=400, norms=norms)
    for index, (name, recipe) in enumerate(candidates(MINI, KINDS).items()):
        report = make_report(recipe, 80 + index, [1 + index / 10] * 6)
        before = make_report(MINI, 80, [1.0] * 6) if index else None
        scores = macro_f1.get(name, [0.90, 0.80, 0.95])
        choice = Choice(name, recipe, 43008 * (index + 1), Comparison(report, before), scores)
        choice.comparison.predicted["here"] = Comparison(make_report(recipe, 80 + index))
        study.choices.append(choice)
    study.without_lora = [0.85, 0.75, 0.9]
    return study


@pytest.fixture
def step(tiny_step):
    return tiny_step(train_base=True, lora_targets=("q_proj", "gate_proj"), **PACKED)


def test_norms_are_those_of_autograd(step, tiny_batches):
    some = tiny_batches(2, **PACKED)
    step(some[0])  # or every lora_A would have a gradient of zero
    found = {(n.layer, n.kind): n for n in gradient_norms(step, some)}
    assert len(found) == 2 * len(KINDS)
    assert step.model.training
    assert all(parameter.grad is None for parameter in step.model.parameters())
    block = linear_layers(step.model)
    query, output = block[1, "q_proj"], block[0, "o_proj"]
    step.model.eval()
    for index, batch in enumerate(some):
        loss = step.loss(batch, pairs=len(batch.labels))
        wanted = [query.base_layer.weight, output.weight]
        matrices = [query.lora_A["default"].weight, query.lora_B["default"].weight]
        by_hand = torch.autograd.grad(loss, wanted + matrices)
        sizes = [gradient.flatten().norm().item() for gradient in by_hand]
        assert found[1, "q_proj"].whole[index] == pytest.approx(sizes[0], rel=1e-4)
        assert found[0, "o_proj"].whole[index] == pytest.approx(sizes[1], rel=1e-4)
        both = sqrt(sizes[2] ** 2 + sizes[3] ** 2)
        assert found[1, "q_proj"].lora[index] == pytest.approx(both, rel=1e-4)
    assert sizes[2] > 0
    assert found[0, "o_proj"].lora == ()
    size = query.base_layer.weight.numel()
    per_entry = [whole / sqrt(size) for whole in found[1, "q_proj"].whole]
    assert found[1, "q_proj"].per_entry == pytest.approx(per_entry)


def test_means_are_over_layers_and_batches():
    norms = [
        norm("q_proj", 1.0, 3.0),
        norm("q_proj", 5.0, 7.0, layer=1),
        norm("o_proj", 8.0, 8.0),
    ]
    assert by_kind(norms) == {"q_proj": 4.0, "o_proj": 8.0}
    assert by_kind(norms, "per_entry") == {"q_proj": 2.0, "o_proj": 4.0}
    found = ratio(norms, ["o_proj"], ["q_proj"])
    assert found.mean == pytest.approx((8 / 3 + 8 / 5) / 2)
    assert found.low < found.mean < found.high


def test_the_counts_are_those_of_the_formula():
    for name, recipe in candidates(MINI, KINDS).items():
        counted = trainable_parameters(outline(recipe))["lora"]
        assert counted == lora_parameters(recipe.lora_targets, recipe.lora_rank), name


def test_the_exercise_takes_the_formula_and_no_other_number():
    right = lora_parameters(("gate_proj",), 16)
    assert check_parameters(MINI, right).startswith("Right")
    assert check_parameters(MINI, None) == UNANSWERED
    with pytest.raises(WrongAnswer, match="is not it"):
        check_parameters(MINI, right // 6)  # of one layer only


def test_choices_form_a_star():
    found = candidates(MINI, KINDS)
    first, *others = found.values()
    assert first == MINI
    assert len(others) == 6
    changed = [set(differences(first, other)) for other in others]
    assert changed.count({"lora_targets"}) == 3
    assert changed.count({"lora_rank", "lora_alpha"}) == 2
    assert {recipe.lora_alpha / recipe.lora_rank for recipe in found.values()} == {2}
    article = found["q k v o gate, rank 4"]
    assert (article.lora_targets, article.lora_rank) == ARTICLE_CHOICE
    assert article.lora_alpha == 8
    assert list(candidates(MINI, KINDS, few=True)) == ["q k v, rank 8", "all linear, rank 8"]


def test_choices_name_only_layers_that_exist():
    kinds = ["q_proj", "k_proj", "v_proj", "dense"]
    for recipe in candidates(MINI, kinds).values():
        assert set(recipe.lora_targets) <= set(kinds)
    assert with_rank(MINI, 1).lora_alpha == 2


def test_taking_out_lora_leaves_base_and_head(tiny_step, tiny_batches):
    step = tiny_step(**PACKED)
    batch = tiny_batches(1, **PACKED)[0]
    untouched = step.loss(batch, pairs=8).item()  # every lora_B is zero in the beginning
    for name, parameter in step.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)
    assert step.loss(batch, pairs=8).item() != untouched
    take_out_lora(step.model)
    assert step.loss(batch, pairs=8).item() == untouched


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ([0.91, 0.79, 0.96], "no difference shown"),
        ([0.95, 0.86, 0.99], "better: +0.0"),
        ([0.85, 0.74, 0.91], "worse: −0.0"),
        ([0.90, 0.80, 0.95], "no difference with any seed"),
    ],
)
def test_a_difference_is_claimed_only_if_its_interval_excludes_none(scores, words):
    study = make_study({"q v, rank 8": scores})
    first, choice = study.choices[:2]
    assert words in difference_words(choice.macro_f1, first.macro_f1)
    assert gain(choice.macro_f1, first.macro_f1).mean == pytest.approx(
        sum(scores) / 3 - sum(first.macro_f1) / 3, abs=1e-12
    )
    assert any(words in sentence for sentence in findings(study))


def test_the_articles_ratio_is_held_against_the_interval():
    rest = [norm(kind, 1.0, 1.0) for kind in KINDS[:3]]
    study = LoraStudy("small", KINDS, 12, 400)
    for large, inside in (((1.7, 1.7), True), ((3.0, 3.0), False)):
        study.norms = rest + [norm(kind, *large) for kind in KINDS[3:5]]
        words = article_words(study)
        assert ("is in the interval of: whole gradient, per entry" in words) == inside
        assert ("is in none of them" in words) != inside
    study.kinds = KINDS[:4]
    assert "there is no gate_proj" in article_words(study)


def test_tables_hold_the_figures():
    study = make_study()
    lines = found_table(study).splitlines()
    assert len(lines) == 2 + len(study.choices)
    assert "| 43,008 | exact | 80.0 MiB | the first choice |" in lines[2]
    assert "0.91 times as fast as the first choice" in lines[3]
    assert "no prediction" in predicted_table(study)
    assert "| gate_proj | 192 | 576 | 6 |" in layers_table(outline(MINI))


def test_what_was_not_measured_is_said():
    study = make_study()
    study.choices[1].comparison.after = make_report(
        study.choices[1].recipe,
        status="out_of_memory",
        reason="too much",
        memory=None,
        seconds=(),
    )
    assert "q v, rank 8 has no figures: out of memory: too much." in findings(study)
    assert "not measured" in found_table(study)
    assert_tidy(plot_lora_costs(study)[0].figure)


def test_the_heat_maps_show_multiples_of_q_k_and_v():
    study = make_study()
    axes = plot_gradients(study)
    drawn = [row[0] for row in axes[0].images[0].get_array().tolist()]
    middle = (2.05 + 3.05 + 4.05) / 3
    assert drawn == pytest.approx([(2.05 + i) / middle for i in range(7)])
    assert multiples(study, "lora")[0][0] == pytest.approx(2.05 / middle)
    assert texts(axes[0]).startswith("0.7 1.0 1.3")
    assert_tidy(axes[0].figure)


def test_many_layers_are_drawn_without_numbers():
    study = make_study()
    study.norms = [norm(kind, 1.0, 2.0, layer=n) for n in range(28) for kind in KINDS]
    axes = plot_gradients(study)
    assert not axes[0].texts
    assert_tidy(axes[0].figure)


def test_the_costs_are_drawn_as_they_are():
    study = make_study()
    counts, peaks, speeds = plot_lora_costs(study)
    assert [bar.get_width() for bar in counts.patches] == [
        choice.lora_parameters / 1000 for choice in study.choices
    ]
    assert [bar.get_width() for bar in peaks.patches] == [
        (80 + index) * 2**20 for index in range(len(study.choices))
    ]
    assert "0.91" in texts(speeds)
    assert_tidy(counts.figure)


def test_the_quality_is_drawn_seed_by_seed():
    study = make_study({"q v, rank 8": [0.95, 0.86, 0.99]})
    scores, gains = plot_lora_quality(study)
    rings = [line.get_xdata().tolist() for line in scores.lines if line.get_marker() == "o"]
    assert rings == [choice.macro_f1 for choice in study.choices]
    rings = [line.get_xdata() for line in gains.lines if line.get_marker() == "o"]
    assert rings[0] == pytest.approx([0.05, 0.06, 0.04])
    assert_tidy(scores.figure)


def test_the_alternative_texts_say_what_is_drawn():
    study = make_study(profile="tiny")
    for alt in (alt_gradients, alt_lora_costs, alt_lora_quality):
        words = alt(study)
        assert "tiny: not a result" in words
        assert MACHINE["name"] in words
    assert "q_proj 2, k_proj 3" in alt_gradients(study)
    assert "q k v, rank 8: 43,008 parameters, peak 80.0 MiB" in alt_lora_costs(study)


@pytest.fixture
def sitting(tmp_path, pairs):
    """A sitting on a few pairs, so that tokenising them takes no time."""
    data = tmp_path / "pairs.jsonl"
    rows = zip(pairs.first, pairs.second, pairs.labels, strict=True)
    lines = [
        json.dumps(dict(zip(("sentence1", "sentence2", "label"), row, strict=True)))
        for row in islice(rows, 80)
    ]
    data.write_text("\n".join(lines), encoding="utf-8")
    return open_lora_choice(
        profile="tiny", run_folder=str(tmp_path), data=str(data), model="qwen3-tiny"
    )


def test_wrong_layers_are_a_sentence_and_no_traceback(sitting, capsys):
    sitting.try_targets("q_proj", "key")
    sitting.try_targets("q_proj")
    said = capsys.readouterr().out
    assert said.count("Markdown") == 2  # shown, and nothing raised
    with pytest.raises(Hint, match="no choices yet"):
        sitting.measure()
    with pytest.raises(Hint, match="no choices yet"):
        sitting.train()
    with pytest.raises(Hint, match="run the cells under Run first"):
        sitting.say()
    with pytest.raises(Hint, match="A guess is a number"):
        sitting.guess("large")


def test_one_seed_is_refused():
    with pytest.raises(Hint, match="at least 2"):
        open_lora_choice(seeds=1)


def test_a_sitting_leaves_record_and_figures(sitting, tmp_path):
    sitting.guess(1.5)
    sitting.predict()
    sitting.gradients()
    sitting.measure()
    sitting.train()
    for plot in (plot_gradients, plot_lora_costs, plot_lora_quality):
        sitting.show(plot)
    sitting.say()
    record = json.loads((tmp_path / "lora_choice.json").read_text(encoding="utf-8"))
    assert [choice["name"] for choice in record["choices"]] == [
        "q k v, rank 8", "all linear, rank 8",
    ]  # fmt: skip
    assert all(len(choice["macro_f1"]) == 2 for choice in record["choices"])
    assert len(record["norms"]) == 2 * len(KINDS)
    texts = json.loads((tmp_path / "figures" / "alt.json").read_text(encoding="utf-8"))
    assert all(name.startswith("08_lora_choice-") for name in texts)
    first, second = sitting.study.choices
    for choice in (first, second):
        here = choice.comparison.predicted["here"].after.memory.peak_allocated_bytes
        assert abs(here - choice.report.memory.peak_allocated_bytes) < 4096
    assert second.lora_parameters > first.lora_parameters
    assert replace(second.recipe, lora_targets=first.recipe.lora_targets) == first.recipe
