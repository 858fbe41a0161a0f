"""How far a predicted peak is from the measured one: fails when the error drifts."""

import pytest

from labkit.measure import measure
from labkit.predict.prediction import predict
from labkit.recipe import ladder, profile_named

PROFILE = profile_named("tiny")
EAGER = {
    slug: recipe for slug, recipe in ladder(PROFILE.recipe).items() if recipe.compile == "none"
}
TOLERANCE = 0.001  # of the measured peak
SCRATCH = 0.05  # what products in 16 bits may take besides on a CPU: their library's own choice


@pytest.mark.parametrize("slug", EAGER)
def test_the_measured_peak_is_the_predicted_one(slug, pairs):
    recipe = EAGER[slug]
    measured = measure(recipe, pairs, device="cpu", warmup_steps=1, timed_steps=3)
    predicted = predict(recipe, None, pairs=pairs)
    peak = measured.memory.peak_allocated_bytes
    owners = dict(measured.memory.by_owner)
    errors = {owner: predicted.memory.by_owner[owner] - held for owner, held in owners.items()}
    in_16_bits = measured.precision["autocast"] != "none"
    scratch = errors.pop("temporaries")
    assert predicted.precision == measured.precision
    assert max(map(abs, errors.values())) <= TOLERANCE * peak, errors
    assert abs(scratch) <= (SCRATCH if in_16_bits else TOLERANCE) * peak
    error = predicted.memory.peak_allocated_bytes - peak
    assert abs(error) <= (SCRATCH if in_16_bits else TOLERANCE) * peak


def test_the_five_eager_steps_are_held_to_it():
    assert len(EAGER) == 5
