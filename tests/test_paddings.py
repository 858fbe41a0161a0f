"""How much of an epoch is padding, counted by hand."""

from dataclasses import replace

import pytest

from labkit.captions import alt_padding
from labkit.data import Pairs
from labkit.padding_plots import plot_padding
from labkit.paddings import padding_shares
from labkit.recipe import Recipe

SHARES = {"max": 0.75, "longest": 0.5, "none": 0.0}


def test_shares_are_those_counted_by_hand(tokenizer):
    pairs = Pairs(["一"] * 6, ["二", "二二", "二"] * 2, [0, 1] * 3, "six", "0", [])
    texts = zip(pairs.first, pairs.second, strict=True)
    lengths = [len(tokenizer(one, other)["input_ids"]) for one, other in texts]
    short, long = min(lengths), max(lengths)
    assert sorted(lengths) == [short] * 4 + [long] * 2
    recipe = Recipe(model="qwen3-tiny", batch_size=3, max_length=16)
    shares = padding_shares(recipe, pairs)
    real = sum(lengths)
    assert shares["max"] == 1 - real / (6 * 16)
    assert shares["none"] == 0
    # all six are sorted together: three short ones, then a short and both long ones
    assert shares["grouped, 2 batches"] == 1 - real / (3 * short + 3 * long)
    assert shares["longest"] >= shares["grouped, 2 batches"]


def test_the_share_does_not_depend_on_where_ids_come_from(pairs):
    few = replace(pairs, first=pairs.first[:50], second=pairs.second[:50])
    few = replace(few, labels=pairs.labels[:50])
    recipe = Recipe(model="qwen3-tiny", batch_size=4)
    fast = replace(recipe, padding="none", last_token_only=True, cached=True)
    assert padding_shares(fast, few) == padding_shares(recipe, few)


def test_bars_are_as_long_as_the_shares():
    ax = plot_padding(SHARES)
    assert [bar.get_width() for bar in ax.patches] == [75, 50, 0]
    assert [label.get_text() for label in ax.get_yticklabels()] == list(SHARES)
    assert "counted" in ax.get_title(loc="left")


def test_the_figure_is_described_with_its_numbers():
    for words in ("max: 75.0%", "longest: 50.0%", "none: 0.0%"):
        assert words in alt_padding(SHARES)


@pytest.mark.parametrize("pairs_a_batch", [1, 7])
def test_a_batch_of_any_size_is_counted(pairs, pairs_a_batch):
    few = replace(pairs, first=pairs.first[:9], second=pairs.second[:9], labels=[0] * 9)
    shares = padding_shares(Recipe(model="qwen3-tiny", batch_size=pairs_a_batch), few)
    assert all(0 <= share < 1 for share in shares.values())
    if pairs_a_batch == 1:
        assert shares["longest"] == 0
