"""Sentences must follow the figures: also when a step does nothing, or was not measured."""

from dataclasses import replace

import pytest

from labkit.exercises import UNANSWERED, WrongAnswer, check_answer, judge
from labkit.findings import findings, ladder_findings, speed_product, variant_findings
from labkit.recipe import Recipe, ladder
from labkit.report import Comparison, Memory, Report

STEPS = ladder(Recipe(model="qwen3-tiny"))
SLUGS = list(STEPS)


def report(slug, seconds, *, peak=1000, activations=600, **fields):
    owners = {"weights": 300, "gradients": 50, "optimizer_state": 40, "inputs": 10}
    memory = Memory(
        peak_allocated_bytes=peak,
        by_phase={"before": 400, "forward": peak - 1, "backward": peak},
        by_owner={**owners, "activations": activations},
        state_bytes={**owners, "inputs": 0, "activations": 0},
    )
    values = {
        "memory": memory,
        "step_seconds": seconds,
        "data_seconds": [0.001] * len(seconds),
        "real_tokens": [100] * len(seconds),
        "computed_tokens": [400] * len(seconds),
        "losses": [0.5, 0.25],
        "layer_forwards": 1.0,
        "trainable": {"lora": 10, "head": 2, "base": 0},
        "precision": {"weights": "float32", "autocast": "none", "reason": ""},
    }
    return Report(STEPS[slug], **{**values, **fields})


def compare(slug, before_seconds, after_seconds, *, before=None, after=None):
    previous = SLUGS[SLUGS.index(slug) - 1]
    return Comparison(
        before=report(previous, before_seconds, **(before or {})),
        after=report(slug, after_seconds, **(after or {})),
    )


def text(slug, comparison):
    return " ".join(findings(slug, comparison))


def test_no_effect_on_speed_is_said_as_such():
    said = text("03_amp", compare("03_amp", [1.0, 1.0, 1.2, 0.9] * 2, [1.0, 1.1, 1.0, 1.0] * 2))
    assert "do not agree enough to show an effect on speed" in said
    assert "the same as the previous step, to the byte" in said


def test_a_clear_effect_is_said_with_its_spread():
    said = text("02_checkpointing", compare("02_checkpointing", [1] * 8, [2] * 8))
    assert "0.50 times as fast as the previous step" in said
    assert "agree" not in said


def test_a_format_that_is_imitated_is_explained_by_its_measured_cost():
    fields = {
        "product_seconds": {"float32": 0.01, "bfloat16": 0.4},
        "notes": ["autocast: bfloat16 was asked for, float32 is used"],
    }
    said = text("03_amp", compare("03_amp", [1, 1, 1], [1, 1, 1], after=fields))
    assert "40 times as long" in said
    assert "both recipes ran the same code here" in said
    assert "bfloat16 was asked for" in said


def test_a_native_format_makes_no_excuses():
    fields = {"precision": {"weights": "float32", "autocast": "bfloat16", "reason": ""}}
    said = text("03_amp", compare("03_amp", [2, 2, 2], [1, 1, 1], after=fields))
    assert "Matrix products ran in bfloat16" in said
    assert "same code" not in said


def test_compiling_that_never_pays_says_so():
    fields = {
        "compile": {"first_step_seconds": 9, "graphs": 1, "recompilations_while_timed": 0}
    }
    slow = compare("05_compile", [1, 1, 1], [2, 2, 2], after=fields)
    assert "never pays for itself here" in text("05_compile", slow)
    fast = compare("05_compile", [2, 2, 2], [1, 1, 1], after=fields)
    assert "paid for itself after 8 steps" in text("05_compile", fast)


def test_the_part_of_making_batches_is_computed():
    said = text("06_cached_data", compare("06_cached_data", [0.1] * 3, [0.01] * 3))
    assert "Before, making a batch took 1.0 ms of each step on average, 1.00%" in said
    assert "Now, making a batch took 1.0 ms of each step on average, 10.00%" in said


def test_losses_are_compared_step_by_step():
    same = compare("01_freeze_base", [1, 1, 1], [1, 1, 1])
    assert "is the same, to the last bit" in text("01_freeze_base", same)
    other = compare("01_freeze_base", [1, 1], [1, 1], after={"losses": [0.5, 0.75]})
    assert "differ by 5.0e-01 at most" in text("01_freeze_base", other)


@pytest.mark.parametrize("slug", SLUGS)
def test_a_step_without_figures_says_only_why(slug):
    gone = Report(STEPS[slug], status="out_of_memory", reason="tried to allocate")
    said = findings(slug, Comparison(after=gone, before=report(SLUGS[0], [1])))
    assert len(said) == 1
    assert said[0].startswith("This step has no figures: out of memory")


@pytest.mark.parametrize("slug", SLUGS[1:])
def test_a_step_after_one_without_figures_compares_nothing(slug):
    gone = Report(STEPS["00_baseline"], status="out_of_memory", reason="tried")
    said = " ".join(findings(slug, Comparison(after=report(slug, [1, 1, 1]), before=gone)))
    assert "no comparison, previous step out of memory" in said


@pytest.mark.parametrize("slug", SLUGS[1:])
def test_a_step_that_was_not_timed_has_no_speed(slug):
    fields = {
        "compile": {"first_step_seconds": 9, "graphs": 1, "recompilations_while_timed": 0}
    }
    said = text(slug, compare(slug, [1, 1, 1], [], after=fields))
    assert "Speed: no ratio" in said


def test_the_whole_ladder_is_summed_up():
    comparisons = {
        "00_baseline": Comparison(after=report("00_baseline", [4] * 6)),
        "01_freeze_base": compare("01_freeze_base", [4] * 6, [2] * 6, after={"peak": 900}),
        "02_checkpointing": compare(
            "02_checkpointing", [2] * 6, [4] * 6, before={"peak": 900}, after={"peak": 700}
        ),
        "05_compile": Comparison(
            after=Report(STEPS["05_compile"], status="skipped", reason="no compiler")
        ),
    }
    said = " ".join(ladder_findings(comparisons))
    assert "05_compile has no figures: skipped: no compiler." in said
    assert "from 1000 B (00_baseline) to 700 B (02_checkpointing)" in said
    assert "02_checkpointing lowered it most, by 200 B" in said
    assert "Clearly faster than the step before: 01_freeze_base." in said
    assert "Clearly slower than the step before: 02_checkpointing." in said
    assert "The ratios multiply to 1.00" in said


def test_a_ladder_without_figures_has_nothing_to_compare():
    gone = Report(STEPS["00_baseline"], status="error", reason="it broke")
    assert ladder_findings({"00_baseline": Comparison(after=gone)})[-1] == (
        "There is nothing to compare."
    )


def test_answers_are_judged_by_their_relative_error():
    assert judge(101, 100, "hint").startswith("Right: 100")
    with pytest.raises(WrongAnswer, match=r"102 is not it\. Try again"):
        judge(102, 100, "Try again")


@pytest.mark.parametrize("answer", ["fifty", [50], float("nan")])
def test_an_answer_that_is_no_number_is_wrong(answer):
    with pytest.raises(WrongAnswer, match="Try again"):
        judge(answer, 50, "Try again")


def test_a_wrong_answer_is_shown_without_a_traceback():
    assert WrongAnswer("3 is not it.")._render_traceback_() == ["3 is not it."]


def test_an_open_exercise_is_no_error():
    assert (
        check_answer("00_baseline", None, Comparison(report("00_baseline", [1]))) == UNANSWERED
    )


def test_there_is_nothing_to_check_when_nothing_was_measured():
    gone = replace(report("00_baseline", [1]), status="out_of_memory", memory=None)
    assert "was not measured here" in check_answer("00_baseline", 5, Comparison(gone))


def test_too_few_pairs_are_not_called_a_lack_of_agreement():
    said = text("02_checkpointing", compare("02_checkpointing", [1, 1, 1], [2, 2, 2]))
    assert "3 pairs are too few to exclude chance" in said
    assert "agree" not in said


def test_a_broken_chain_of_ratios_gives_no_product():
    chain = {
        "00_baseline": Comparison(after=report("00_baseline", [4] * 6)),
        "01_freeze_base": compare("01_freeze_base", [4] * 6, [2] * 6),
        "02_checkpointing": compare("02_checkpointing", [2] * 6, [4] * 6),
    }
    assert speed_product(chain) == 1.0
    del chain["01_freeze_base"]
    assert speed_product(chain) is None
    said = " ".join(ladder_findings(chain))
    assert "How fast 02_checkpointing is against 00_baseline is not known" in said


def test_without_padding_the_share_and_both_rates_are_said():
    after = {"computed_tokens": [100] * 8}
    said = text("07_no_padding", compare("07_no_padding", [1.0] * 8, [0.25] * 8, after=after))
    assert "75.0% were padding" in said  # 100 of 400 were real
    assert "computed 800 for 800 real ones" in said
    assert "400 real tokens a second, the step before on 100" in said


def test_two_variants_are_compared_in_words():
    recipes = [replace(STEPS["03_amp"], **fields) for fields in ({}, {"weights": "bfloat16"})]
    pair = compare("03_amp", [1.0] * 8, [0.5] * 8, after={"peak": 900})
    pair.before.recipe, pair.after.recipe = recipes
    said = " ".join(variant_findings(pair))
    assert 'weights: "float32" → "bfloat16"' in said
    assert "2.00 times as fast" in said
    assert "900 B" in said


def test_a_variant_that_was_not_measured_says_why():
    pair = compare("03_amp", [1.0] * 8, [0.5] * 8)
    pair.after.status, pair.after.reason = "out_of_memory", "no more"
    (said,) = variant_findings(pair)
    assert said.startswith("There are no figures of one variant: ")
    assert "no more" in said
