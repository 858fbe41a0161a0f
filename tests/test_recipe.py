from dataclasses import FrozenInstanceError, fields, replace
from itertools import pairwise

import pytest

from labkit.recipe import (
    LADDER_CHANGES,
    PROFILES,
    Recipe,
    RecipeError,
    command_options,
    describe_change,
    differences,
    ladder,
    profile_named,
)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("batch_size", -1, "batch_size must be a whole number, at least 1, not -1"),
        ("batch_size", 2.5, "batch_size must be a whole number"),
        ("batch_size", True, "batch_size must be a whole number"),
        ("max_length", 1, "max_length must be a whole number, at least 2"),
        ("weights", "float8", "weights must be one of float32, bfloat16, float16"),
        ("autocast", "", "autocast must be one of none"),
        ("compile", "fast", "compile must be one of none, default"),
        ("padding", "left", "padding must be one of longest, max"),
        ("cached", 1, "cached must be true or false"),
        ("lora_targets", (), "lora_targets must name at least one"),
        ("lora_dropout", 1.0, r"lora_dropout must be in \[0, 1\)"),
        ("learning_rate", 0.0, "learning_rate must be between 0 and 1"),
        ("model", "", "model must be a geometry"),
    ],
)
def test_a_wrong_value_is_refused_by_name(field, value, words):
    with pytest.raises(RecipeError, match=words):
        Recipe(**{field: value})


def test_more_micro_batches_than_pairs_are_refused():
    with pytest.raises(
        RecipeError, match=r"micro_batches \(5\) is larger than batch_size \(4\)"
    ):
        Recipe(batch_size=4, micro_batches=5)


def test_a_recipe_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Recipe().batch_size = 1


def test_a_recipe_survives_its_json_values():
    recipe = Recipe(lora_targets=["o_proj"], autocast="float16")
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_an_unknown_field_is_refused():
    with pytest.raises(RecipeError, match="unknown recipe field batchsize"):
        Recipe.from_dict({"batchsize": 3})


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_neighbours_on_the_ladder_differ_in_exactly_one_field(profile):
    steps = list(ladder(profile.recipe).values())
    for before, after in pairwise(steps):
        assert len(differences(before, after)) == 1


def test_the_ladder_has_the_eight_steps_of_the_course():
    assert list(ladder(Recipe())) == ["00_baseline", *LADDER_CHANGES]
    assert len(LADDER_CHANGES) == 7


def test_the_baseline_is_the_naive_one():
    baseline = ladder(Recipe())["00_baseline"]
    assert (baseline.train_base, baseline.padding, baseline.cached) == (True, "max", False)


def test_a_change_is_described_by_field_and_values():
    assert describe_change(Recipe(), replace(Recipe(), batch_size=64)) == "batch_size: 32 → 64"
    assert describe_change(None, Recipe()) == "the first step"


def test_every_field_has_a_help_text():
    assert all(field.metadata["help"].endswith(".") for field in fields(Recipe))


def test_an_unknown_profile_is_refused():
    with pytest.raises(RecipeError, match="profile must be one of tiny, small"):
        profile_named("large")


def test_options_make_the_recipe_again():
    recipe = Recipe(checkpoint_every=2, cached=True, lora_targets=("q_proj", "o_proj"))
    assert command_options(recipe, Recipe()) == [
        "--checkpoint-every", "2", "--cached", "--lora-targets", "q_proj,o_proj",
    ]  # fmt: skip
    assert command_options(Recipe(), replace(Recipe(), train_base=True)) == ["--no-train-base"]
    names = {option for option in command_options(recipe) if option.startswith("--")}
    assert len(names) == len(fields(Recipe))


def test_a_seed_that_torch_cannot_take_is_refused():
    with pytest.raises(RecipeError, match="seed must be below"):
        Recipe(seed=2**63)
