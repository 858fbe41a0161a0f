"""Synthetic question pairs, made from a small grammar: their labels are true by construction.

A pair labelled 1 asks one question in two wordings. A pair labelled 0 asks two questions that
differ in exactly one thing: the product, the intent (within a topic) or the value of a slot.
Lengths and label split follow AFQMC, the corpus the pairs stand in for.
"""

import hashlib
import json
import random
import tomllib
from dataclasses import dataclass, replace
from itertools import pairwise
from string import Formatter

from labkit.data import DATA_FOLDER, DataError

TRAINING_PAIRS = 3200
SAME_SHARE = 0.31  # of the pairs ask the same question, as in AFQMC
LENGTH_QUANTILES = (  # of AFQMC's pairs: the share that is at most so many characters long
    (0, 10), (0.1, 17), (0.25, 20), (0.5, 25), (0.75, 30), (0.9, 39), (0.99, 64), (1, 157),
)  # fmt: skip
ATTEMPTS = 15  # renderings of a pair, of which the one nearest to the wanted length is kept


@dataclass(frozen=True)
class Question:
    """What is asked, apart from the words: two texts of equal questions are paraphrases."""

    topic: str
    intent: str
    product: int
    values: dict[str, int]  # slot: which of its values


def make_splits(pairs: int = TRAINING_PAIRS, seed: int = 0) -> dict[str, bytes]:
    """The files of a synthetic corpus, the same bytes for the same arguments.

    Args:
        pairs: Training pairs, at least 8; dev and test get an eighth of that each.
        seed: Another seed gives another corpus.

    Returns:
        Content by file name: three JSONL files without a pair in common, and SHA256SUMS.

    Raises:
        DataError: ``pairs`` is below 8, or the grammar has not so many different pairs.
    """
    if pairs < 8:
        raise DataError(f"{pairs} pairs are too few to split; make at least 8.")
    maker = PairMaker(seed)
    files = {}
    for name, count in (("train", pairs), ("dev", pairs // 8), ("test", pairs // 8)):
        rows = (json.dumps(row, ensure_ascii=False) for row in maker.rows(count))
        files[f"{name}.jsonl"] = "".join(f"{row}\n" for row in rows).encode()
    sums = (f"{hashlib.sha256(content).hexdigest()}  {name}" for name, content in files.items())
    return files | {"SHA256SUMS": "".join(f"{line}\n" for line in sums).encode()}


class PairMaker:
    """Draws questions and says them, never the same pair twice."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.made: set[frozenset[str]] = set()
        text = (DATA_FOLDER / "pairs" / "grammar.toml").read_text(encoding="utf-8")
        self.grammar = tomllib.loads(text)

    def rows(self, count: int) -> list[dict]:
        """``count`` new rows with the labels and the lengths of AFQMC."""
        labels = [int(i < round(count * SAME_SHARE)) for i in range(count)]
        lengths = [length_at(i / max(1, count - 1)) for i in range(count)]
        self.rng.shuffle(labels)
        self.rng.shuffle(lengths)
        return [self._row(label, length) for label, length in zip(labels, lengths, strict=True)]

    def _row(self, label: int, length: float) -> dict:
        for extra in range(ATTEMPTS):  # there are few short pairs; make room for more words
            first, second = self.pair(*self.questions(label), length + extra)
            if frozenset((first, second)) not in self.made:
                self.made.add(frozenset((first, second)))
                return {"sentence1": first, "sentence2": second, "label": str(label)}
        raise DataError(
            f"the grammar is exhausted after {len(self.made):,} different pairs; ask for fewer."
        )

    def questions(self, label: int) -> tuple[Question, Question]:
        """A question and, for 1, the same again or, for 0, one that differs in one thing."""
        topic = self.rng.choice(list(self.grammar["topics"]))
        intent = self.rng.choice(list(self.grammar["topics"][topic]))
        product = self.rng.randrange(len(self.grammar["products"]))
        question = self.fill_slots(Question(topic, intent, product, {}))
        return question, question if label else self._confusable(question)

    def fill_slots(self, question: Question) -> Question:
        """Give the question the slots of its intent; a value that it has stays."""
        wording = self._wordings(question)[0]
        slots = {slot for _, slot, _, _ in Formatter().parse(wording) if slot} - {"product"}
        values = {
            slot: question.values.get(
                slot, self.rng.randrange(len(self.grammar["slots"][slot]))
            )
            for slot in sorted(slots)
        }
        return replace(question, values=values)

    def _confusable(self, question: Question) -> Question:
        change = self.rng.choice(["intent", "product", *question.values])
        if change == "intent":
            intents = self.grammar["topics"][question.topic]
            intent = self.rng.choice([name for name in intents if name != question.intent])
            return self.fill_slots(replace(question, intent=intent))
        if change == "product":
            product = self._other(question.product, self.grammar["products"])
            return replace(question, product=product)
        value = self._other(question.values[change], self.grammar["slots"][change])
        return replace(question, values=question.values | {change: value})

    def _other(self, index: int, choices: list) -> int:
        return self.rng.choice([i for i in range(len(choices)) if i != index])

    def _wordings(self, question: Question) -> list[str]:
        return self.grammar["topics"][question.topic][question.intent]

    def pair(self, question: Question, other: Question, length: float) -> tuple[str, str]:
        """Two texts, together about ``length`` characters; a paraphrase has another wording."""
        return min(
            (self._render(question, other, length) for _ in range(ATTEMPTS)),
            key=lambda texts: abs(len(texts[0]) + len(texts[1]) - length),
        )

    def _render(self, question: Question, other: Question, length: float) -> tuple[str, str]:
        wording = self.rng.choice(self._wordings(question))
        others = [w for w in self._wordings(other) if question != other or w != wording]
        first = self.say(question, wording, length * self.rng.uniform(0.35, 0.65))
        return first, self.say(other, self.rng.choice(others), length - len(first))

    def say(self, question: Question, wording: str, length: float) -> str:
        """The question in one wording, with as much small talk as ``length`` has room for."""
        grammar, rng = self.grammar, self.rng
        values = {
            slot: rng.choice(grammar["slots"][slot][value])
            for slot, value in question.values.items()
        }
        text = wording.format(
            product=rng.choice(grammar["products"][question.product]), **values
        )
        opening, ending = rng.choice(grammar["openings"]), rng.choice(grammar["endings"])
        if len(opening + text) <= length:
            text = opening + text
        if len(text + ending) <= length:
            text += ending
        for aside in rng.sample(grammar["asides"], len(grammar["asides"])):
            if len(aside + text) <= length:
                text = aside + text
        return text


def length_at(share: float) -> float:
    """The length in characters that this share of AFQMC's pairs does not exceed."""
    for (low, shorter), (high, longer) in pairwise(LENGTH_QUANTILES):
        if low <= share <= high:
            return shorter + (longer - shorter) * (share - low) / (high - low)
    raise ValueError(f"a share lies between 0 and 1, which {share} does not")
