import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn import metrics

from labkit.data import DataError, Pairs
from labkit.quality import (
    Scores,
    answer,
    evaluate,
    find_threshold,
    interval,
    macro_f1,
    summarise,
)
from labkit.subsets import hold_out, sample
from labkit.trainable import TrainingError


def counts_of(labels, answers):
    return Counter(zip(labels, answers, strict=True))


@pytest.fixture
def few(pairs):
    """13 of the pairs: the last of batches of 8 or 5 is smaller."""
    return sample(pairs, 13, seed=3)


def test_scores_from_counts_are_those_worked_out_by_hand():
    # 3 of label 1 found, 1 missed, 2 of label 0 taken for it, 4 not
    labels, answers = [1] * 4 + [0] * 6, [1, 1, 1, 0, 1, 1, 0, 0, 0, 0]
    accuracy, classes = summarise(counts_of(labels, answers))
    assert accuracy == pytest.approx(0.7)
    same, different = classes["same"], classes["different"]
    assert (same.precision, same.recall) == pytest.approx((3 / 5, 3 / 4))
    assert same.f1 == pytest.approx(2 / 3)
    assert (different.precision, different.recall) == pytest.approx((4 / 5, 4 / 6))
    assert different.f1 == pytest.approx(8 / 11)
    assert (same.support, different.support) == (4, 6)
    assert macro_f1(classes) == pytest.approx((2 / 3 + 8 / 11) / 2)
    assert macro_f1(classes) == pytest.approx(
        metrics.f1_score(labels, answers, average="macro")
    )


def test_counts_are_pooled_not_averaged_over_batches():
    batches = [([1, 1, 0, 0], [1, 1, 0, 0]), ([0, 0, 0, 1], [0, 0, 0, 0])]
    pooled = sum((counts_of(*batch) for batch in batches), Counter())
    averaged = sum(macro_f1(summarise(counts_of(*batch))[1]) for batch in batches) / 2
    assert macro_f1(summarise(pooled)[1]) == pytest.approx((0.8 + 10 / 11) / 2)
    assert averaged == pytest.approx((1 + 3 / 7) / 2)


def test_always_answering_the_frequent_label_is_accurate_and_worth_little():
    accuracy, classes = summarise(Counter({(0, 0): 95, (1, 0): 5}))
    assert accuracy == 0.95
    assert macro_f1(classes) == pytest.approx(0.487, abs=5e-4)
    assert classes["same"].f1 == 0


def test_scores_are_those_of_scikit_learn_over_all_logits(tiny_step, few, tokenizer):
    step = tiny_step(lora_dropout=0.5)
    scores = evaluate(step, few, tokenizer, batch_size=5)
    step.model.eval()
    logits = []
    for first, second in zip(few.first, few.second, strict=True):
        encoded = tokenizer(first, second, truncation=True, max_length=32, return_tensors="pt")
        with torch.no_grad():
            logits.append(step.model(**encoded).logits[0])
    logits = torch.stack(logits)
    answers, same = logits.argmax(-1).tolist(), logits.softmax(-1)[:, 1].numpy()
    table = metrics.classification_report(
        few.labels, answers, output_dict=True, zero_division=0
    )
    assert scores.accuracy == pytest.approx(table["accuracy"])
    assert scores.macro_f1 == pytest.approx(table["macro avg"]["f1-score"])
    assert scores.classes["same"].recall == pytest.approx(table["1"]["recall"])
    assert scores.average_precision == pytest.approx(
        metrics.average_precision_score(few.labels, same)
    )
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(few.labels)).item()
    assert scores.loss == pytest.approx(expected, rel=1e-5)
    assert scores.pairs == 13
    assert sum(each.support for each in scores.classes.values()) == 13
    zeros = few.labels.count(0) / 13
    assert scores.majority_accuracy == pytest.approx(max(zeros, 1 - zeros))


@pytest.mark.parametrize("padding", ["max", "none"])
def test_how_batches_are_laid_out_changes_no_score(tiny_step, few, tokenizer, padding):
    plain = evaluate(tiny_step(), few, tokenizer)
    other = evaluate(tiny_step(padding=padding), few, tokenizer, batch_size=3)
    assert other.loss == pytest.approx(plain.loss, rel=1e-5)
    assert other.macro_f1 == plain.macro_f1


def test_evaluating_touches_neither_mode_nor_random_numbers(tiny_step, few, tokenizer):
    step, seen = tiny_step(lora_dropout=0.5), []
    state = torch.get_rng_state()
    evaluate(step, few, tokenizer, progress=seen.append)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in step.model.modules())
    assert all(parameter.grad is None for parameter in step.model.parameters())
    assert seen == ["evaluated 8 of 13 pairs", "evaluated 13 of 13 pairs"]


def test_logits_that_are_not_finite_name_their_pair(tiny_step, few, tokenizer, monkeypatch):
    step = tiny_step()
    real, calls = step.logits, []

    def broken(batch, **options):
        calls.append(batch)
        logits = real(batch, **options)
        if len(calls) == 2:
            logits[1, 0] = math.nan
        return logits

    monkeypatch.setattr(step, "logits", broken)
    with pytest.raises(TrainingError, match=f"pair 10 of 13 of .*{few.first[9][:10]}"):
        evaluate(step, few, tokenizer)
    assert step.model.training


def test_pairs_of_one_label_have_no_average_precision(tiny_step, few, tokenizer):
    alone = replace(few, labels=[0] * 13)
    scores = evaluate(tiny_step(), alone, tokenizer)
    assert scores.average_precision is None
    assert scores.majority_accuracy == 1
    assert scores.majority_macro_f1 == 0.5


def test_no_pairs_are_an_error(tiny_step, tokenizer):
    with pytest.raises(DataError, match="holds no pairs"):
        evaluate(tiny_step(), Pairs([], [], [], "none.tsv", "", []), tokenizer)


def test_scores_survive_json(tiny_step, few, tokenizer):
    scores = evaluate(tiny_step(), few, tokenizer)
    assert Scores.from_dict(scores.to_dict()) == scores


def test_the_interval_is_student_s():
    mean, low, high = interval([0.70, 0.72, 0.74])
    assert mean == pytest.approx(0.72)
    assert high - mean == pytest.approx(4.302653 * 0.02 / math.sqrt(3), rel=1e-6)
    assert mean - low == pytest.approx(high - mean)


def test_one_seed_has_no_interval():
    with pytest.raises(ValueError, match="at least two values"):
        interval([0.7])


def test_a_sample_is_drawn_by_its_seed_and_keeps_the_order(pairs):
    one, again, other = (sample(pairs, 50, seed) for seed in (1, 1, 2))
    assert one == again
    assert one.first != other.first
    assert one.sha256 != other.sha256 != pairs.sha256
    places = [list(zip(pairs.first, pairs.second, strict=True)).index(texts)
              for texts in zip(one.first, one.second, strict=True)]  # fmt: skip
    assert places == sorted(set(places))
    assert sample(pairs, 10**6, 1) is pairs
    with pytest.raises(DataError, match="at least 1 pair"):
        sample(pairs, 0, 1)


def test_what_is_held_out_is_not_trained_on():
    texts = [f"text {number // 2}" for number in range(40)]  # every pair is there twice
    both = Pairs(texts, texts[::-1], [0] * 40, "twice.tsv", "0", [])
    training, held = hold_out(both, 0.2, seed=0)
    assert (len(training), len(held)) == (32, 8)
    seen = {frozenset(each) for each in zip(training.first, training.second, strict=True)}
    assert not seen & {frozenset(each) for each in zip(held.first, held.second, strict=True)}
    assert hold_out(both, 0.2, seed=0) == (training, held)
    assert hold_out(both, 0.2, seed=1) != (training, held)


@pytest.mark.parametrize("share", [0, 1, -0.1, 0.001])
def test_a_share_that_leaves_a_side_empty_is_refused(share):
    few = Pairs(["a", "b"], ["c", "d"], [0, 1], "few.tsv", "0", [])
    with pytest.raises(DataError, match=r"(hold|held) out"):
        hold_out(few, share, seed=0)


def test_the_best_threshold_is_that_of_trying_them_all():
    draw = np.random.default_rng(0)
    for _ in range(20):
        labels = (draw.random(40) < 0.3).astype(int).tolist()
        probabilities = np.round(draw.random(40) * 0.4 + 0.1 * np.array(labels), 2)
        threshold, best = find_threshold(labels, probabilities.astype(np.float32))
        tried = [
            metrics.f1_score(
                labels,
                probabilities.astype(np.float32) > each,
                average="macro",
                zero_division=0,
            )
            for each in np.linspace(0, 1, 1001)
        ]
        assert best == pytest.approx(max(tried))
        at = probabilities.astype(np.float32) > threshold
        assert metrics.f1_score(labels, at, average="macro", zero_division=0) == pytest.approx(
            best
        )


def test_a_threshold_shifts_what_counts_as_the_same(tiny_step, tokenizer, pairs):
    step = tiny_step()
    few = sample(pairs, 60, seed=0)
    answers = answer(step, few, tokenizer)
    plain = answers.scores()
    best = answers.scores(plain.best_threshold)
    assert best.macro_f1 == pytest.approx(plain.best_macro_f1)
    assert best.macro_f1 >= plain.macro_f1
    assert (plain.threshold, best.threshold) == (0.5, plain.best_threshold)
    assert best.average_precision == plain.average_precision


def test_the_best_threshold_holds_between_neighbouring_float32_numbers():
    below = np.nextafter(np.float32(1), np.float32(0))
    probabilities = np.array([1.0, below, 0.2], dtype=np.float32)
    threshold, best = find_threshold([1, 0, 0], probabilities)
    assert best == 1.0
    assert (torch.tensor(probabilities).double() > threshold).tolist() == [True, False, False]
