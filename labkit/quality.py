"""How well a step's model tells pairs that ask the same from pairs that do not.

Scores are computed once, from the counts of all pairs: an F1 averaged over batches is another
number (mxnet #9830).
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sklearn.metrics import accuracy_score, average_precision_score
from sklearn.metrics import precision_recall_fscore_support as class_scores
from torch.nn import functional

from labkit.data import LABELS, DataError, Pairs
from labkit.step import TrainingStep
from labkit.tokens import in_order
from labkit.trainable import TrainingError


@dataclass(frozen=True)
class ClassScores:
    """What is right about the pairs of one label."""

    precision: float
    recall: float
    f1: float
    support: int  # pairs that have the label


@dataclass(frozen=True)
class Scores:
    """Scores on a set of pairs, and those of always answering the label that is more frequent.

    ``average_precision`` is None where no pair has label 1; ``loss`` is the mean over pairs.
    A pair counts as the same if its probability is above ``threshold``. ``best_threshold`` is
    the one that would have had the highest macro-F1 on these very pairs: use it on others.
    """

    pairs: int
    accuracy: float
    macro_f1: float
    average_precision: float | None
    loss: float
    classes: dict[str, ClassScores]  # by name, see data.LABELS
    majority_accuracy: float
    majority_macro_f1: float
    seconds: float
    threshold: float = 0.5
    best_threshold: float = 0.5
    best_macro_f1: float | None = None  # with best_threshold, on these pairs; flattering

    def to_dict(self) -> dict:
        """The scores as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "Scores":
        """The scores that ``to_dict`` wrote."""
        classes = {name: ClassScores(**each) for name, each in values["classes"].items()}
        return cls(**values | {"classes": classes})


class Interval(NamedTuple):
    """A mean, and where the true one lies with 95 % confidence."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Answers:
    """What a model says of some pairs: enough to score it at any threshold.

    ``probabilities`` are (pairs,) float32, of label 1, on the CPU; ``loss`` is the mean.
    """

    labels: list[int]
    probabilities: torch.Tensor
    loss: float
    seconds: float

    def scores(self, threshold: float = 0.5) -> Scores:
        """The scores where a pair counts as the same above this probability."""
        answers = (self.probabilities.double() > threshold).int().tolist()
        accuracy, classes = summarise(Counter(zip(self.labels, answers, strict=True)))
        frequent = max(LABELS, key=self.labels.count)
        majority_accuracy, majority_classes = summarise(
            Counter((label, frequent) for label in self.labels)
        )
        probabilities, precision = self.probabilities.numpy(), None
        if 1 in self.labels:
            precision = float(average_precision_score(self.labels, probabilities))
        best_threshold, best_macro_f1 = find_threshold(self.labels, probabilities)
        return Scores(
            pairs=len(self.labels),
            accuracy=accuracy,
            macro_f1=macro_f1(classes),
            average_precision=precision,
            loss=self.loss,
            classes=classes,
            majority_accuracy=majority_accuracy,
            majority_macro_f1=macro_f1(majority_classes),
            seconds=self.seconds,
            threshold=threshold,
            best_threshold=best_threshold,
            best_macro_f1=best_macro_f1,
        )


def evaluate(step: TrainingStep, pairs: Pairs, tokenizer, **options) -> Scores:
    """Score the model on every pair, as it answers; the options are those of ``answer``."""
    return answer(step, pairs, tokenizer, **options).scores()


def answer(
    step: TrainingStep,
    pairs: Pairs,
    tokenizer,
    *,
    batch_size: int | None = None,
    cache_folder: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Answers:
    """Ask the model about every pair, once and in order, without disturbing its training.

    The model runs uncompiled, so that no graph is compiled for a shape seen only here. Of each
    pair, one float32 probability is kept, on the CPU.

    Args:
        batch_size: Pairs computed at once; the recipe's if left out.
        cache_folder: Where a recipe with ``cached`` keeps token ids.
        progress: Told after each batch how far it is.

    Raises:
        DataError: There are no pairs.
        TrainingError: A pair's logits are not finite.
    """
    if not len(pairs):
        raise DataError(f"{pairs.name} holds no pairs to evaluate on.")
    size = batch_size or step.recipe.batch_size
    start, was_training = time.perf_counter(), step.model.training
    probabilities, loss, done = [], 0.0, 0
    step.model.eval()
    try:
        with torch.no_grad():
            for batch in in_order(
                step.recipe, pairs, tokenizer, batch_size=size, cache_folder=cache_folder
            ):
                logits = step.logits(batch.to(step.device), forward=step.eager_forward)
                logits = logits.float().cpu()
                labels = batch.labels.cpu()
                _check_finite(logits, pairs, done)
                loss += functional.cross_entropy(logits, labels, reduction="sum").item()
                probabilities.append(logits.softmax(dim=-1)[:, 1])
                done += len(labels)
                progress(f"evaluated {done:,} of {len(pairs):,} pairs")
    finally:
        step.model.train(was_training)
    seconds = time.perf_counter() - start
    return Answers(pairs.labels, torch.cat(probabilities), loss / len(pairs), seconds)


def _check_finite(logits: torch.Tensor, pairs: Pairs, done: int) -> None:
    """Refuse logits that are not finite, and name the pair they are of."""
    wrong = (~logits.isfinite().all(dim=-1)).nonzero()
    if len(wrong):
        row = done + wrong[0].item()
        raise TrainingError(
            f"the logits of pair {row + 1:,} of {pairs.name} ({pairs.first[row][:20]!r}, "
            f"{pairs.second[row][:20]!r}) are not finite; computing in float32, or a lower "
            "learning_rate, may help."
        )


def find_threshold(labels: Sequence[int], probabilities: np.ndarray) -> tuple[float, float]:
    """The threshold with the highest macro-F1, and that macro-F1.

    Where few pairs have one of the labels, a model may tell them apart well and still give none
    of them more than half of the probability.

    Args:
        labels: (pairs,) 0 or 1.
        probabilities: (pairs,) of label 1.
    """
    order = np.argsort(-probabilities, kind="stable")
    truth, ranked = np.asarray(labels)[order], probabilities[order].astype(np.float64)
    answered = np.arange(len(truth) + 1)  # how many of the highest count as the same
    right = np.concatenate([[0], truth.cumsum()])  # and how many of those are
    same = truth.sum()
    f1_same = 2 * right / np.maximum(answered + same, 1)
    rest = len(truth) - answered
    f1_other = 2 * (rest - (same - right)) / np.maximum(rest + len(truth) - same, 1)
    # a threshold lies between two different probabilities
    bounds = np.concatenate([[1.0], (ranked[1:] + ranked[:-1]) / 2, [0.0]])
    possible = np.concatenate([[True], ranked[1:] < ranked[:-1], [ranked[-1] > 0]])
    scores = np.where(possible, (f1_same + f1_other) / 2, -1)
    best = int(scores.argmax())
    return float(bounds[best]), float(scores[best])


def summarise(counts: Counter) -> tuple[float, dict[str, ClassScores]]:
    """Accuracy and scores per class, from how often each (label, answer) occurred."""
    cells = [(label, answer) for label in LABELS for answer in LABELS]
    truth, answers = zip(*cells, strict=True)
    weights = [counts[cell] for cell in cells]
    columns = class_scores(
        truth, answers, labels=list(LABELS), sample_weight=weights, zero_division=0.0
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    classes = {
        name: ClassScores(precision, recall, f1, round(support))
        for name, (precision, recall, f1, support) in zip(LABELS.values(), rows, strict=True)
    }
    return float(accuracy_score(truth, answers, sample_weight=weights)), classes


def macro_f1(classes: dict[str, ClassScores]) -> float:
    """The mean of the classes' F1: each counts as much as the other, however rare it is."""
    return sum(each.f1 for each in classes.values()) / len(classes)


def interval(values: Sequence[float]) -> Interval:
    """The mean of some values, one a seed, and its 95 % interval by Student's t.

    Raises:
        ValueError: There are fewer than two values: one seed says nothing about others.
    """
    from scipy import stats

    if len(values) < 2:
        raise ValueError(f"an interval needs at least two values, not {len(values)}.")
    mean, error = sum(values) / len(values), float(stats.sem(values))
    half = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return Interval(mean, mean - half, mean + half)
