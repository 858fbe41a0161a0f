import hashlib
import json
from collections import Counter
from itertools import product as combinations

import pytest

from labkit.data import DATA_FOLDER, DataError, read_pairs
from labkit.synthetic import PairMaker, Question, length_at, make_splits

PAIRS_FOLDER = DATA_FOLDER / "pairs"


@pytest.fixture(scope="module")
def splits():
    return make_splits()


def rows_of(content):
    return [json.loads(line) for line in content.decode().splitlines()]


def test_the_shipped_files_are_what_the_code_makes(splits):
    assert sorted(splits) == ["SHA256SUMS", "dev.jsonl", "test.jsonl", "train.jsonl"]
    for name, content in splits.items():
        assert (PAIRS_FOLDER / name).read_bytes() == content
        assert len(content) < 500_000


def test_the_sums_are_those_of_the_files():
    for line in (PAIRS_FOLDER / "SHA256SUMS").read_text().splitlines():
        sha256, name = line.split("  ")
        assert hashlib.sha256((PAIRS_FOLDER / name).read_bytes()).hexdigest() == sha256


def test_sizes_and_labels_of_the_splits(splits):
    counts = {
        name: Counter(row["label"] for row in rows_of(content))
        for name, content in splits.items()
        if name.endswith(".jsonl")
    }
    assert counts == {
        "train.jsonl": {"0": 2208, "1": 992},
        "dev.jsonl": {"0": 276, "1": 124},
        "test.jsonl": {"0": 276, "1": 124},
    }


def test_no_pair_comes_twice_in_any_order(splits):
    pairs = [
        frozenset((row["sentence1"], row["sentence2"]))
        for name, content in splits.items()
        if name.endswith(".jsonl")
        for row in rows_of(content)
    ]
    assert len(set(pairs)) == len(pairs) == 4000
    assert all(len(pair) == 2 for pair in pairs)


def test_a_seed_decides_the_bytes():
    assert make_splits(16, seed=1) == make_splits(16, seed=1)
    assert make_splits(16, seed=1)["train.jsonl"] != make_splits(16, seed=2)["train.jsonl"]


def test_too_few_pairs_are_refused():
    with pytest.raises(DataError, match="7 pairs are too few to split; make at least 8"):
        make_splits(7)


def test_a_grammar_that_is_exhausted_says_so():
    maker = PairMaker(0)
    maker.grammar = maker.grammar | {
        "asides": [], "openings": [""], "endings": [""], "products": [["x", "X"], ["y", "Y"]],
        "topics": {"t": {"a": ["{product}a", "{product}b"], "c": ["{product}c", "{product}d"]}},
    }  # fmt: skip
    with pytest.raises(DataError, match=r"exhausted after \d+ different pairs; ask for fewer"):
        maker.rows(1000)


def test_label_1_asks_the_same_and_label_0_differs_in_one_thing():
    maker = PairMaker(0)
    changed = Counter()
    for _ in range(500):
        question, same = maker.questions(1)
        assert question == same
        question, other = maker.questions(0)
        assert question.topic == other.topic
        if question.intent == other.intent:
            before, after = ({"product": q.product, **q.values} for q in (question, other))
            (changed_name,) = [name for name in before if before[name] != after[name]]
            changed[changed_name] += 1
        else:
            assert question.product == other.product
            changed["intent"] += 1
    assert set(changed) == {"intent", "product", "months", "amount", "account", "place"}


def test_a_paraphrase_has_another_wording():
    maker = PairMaker(0)
    question = Question("limit", "raise", 0, {})
    maker.grammar["topics"]["limit"]["raise"] = ["{product} one", "{product} two"]
    for _ in range(20):
        first, second = maker.pair(question, question, 10)
        assert ("one" in first) != ("one" in second)


def test_no_text_asks_two_different_questions():
    """Else a pair of it would be both 0 and 1, and nothing could learn which."""
    maker = PairMaker(0)
    asked = {}
    for topic, intents in maker.grammar["topics"].items():
        for intent, product in combinations(intents, range(len(maker.grammar["products"]))):
            slots = maker.fill_slots(Question(topic, intent, product, {})).values
            choices = [range(len(maker.grammar["slots"][slot])) for slot in slots]
            for values in combinations(*choices):
                question = Question(
                    topic, intent, product, dict(zip(slots, values, strict=True))
                )
                for wording in intents[intent]:
                    for _ in range(8):
                        text = maker.say(question, wording, length=0)
                        assert asked.setdefault(text, question) == question
    assert len(asked) > 3000


def test_all_wordings_of_an_intent_have_the_same_slots():
    maker = PairMaker(0)
    for topic, intents in maker.grammar["topics"].items():
        for intent, wordings in intents.items():
            slots = maker.fill_slots(Question(topic, intent, 0, {})).values
            fields = {"{product}", *(f"{{{slot}}}" for slot in slots)}
            assert all(wording.count("{") == len(fields) for wording in wordings)
            assert all(field in wording for wording in wordings for field in fields)


def test_small_talk_fills_the_length_and_keeps_the_question():
    maker = PairMaker(0)
    question = Question("limit", "raise", 0, {})
    text = maker.say(question, "{product}提额", 60)
    assert 40 < len(text) <= 60
    assert "禾付提额" in text
    assert maker.say(question, "{product}提额", 0) in ("禾付提额", "青禾付提额")


def test_lengths_are_drawn_from_the_corpus():
    assert [length_at(share) for share in (0, 0.5, 0.625, 0.9, 1)] == [10, 25, 27.5, 39, 157]
    with pytest.raises(ValueError, match=r"between 0 and 1, which 1\.5 does not"):
        length_at(1.5)


def test_lengths_do_not_give_the_label_away():
    pairs = read_pairs()
    lengths = {0: [], 1: []}
    for first, second, label in zip(pairs.first, pairs.second, pairs.labels, strict=True):
        lengths[label].append(len(first + second))
    means = [sum(lengths[label]) / len(lengths[label]) for label in (0, 1)]
    assert means[0] == pytest.approx(means[1], rel=0.06)
