import json
from dataclasses import replace

import pytest

from labkit.recipe import Recipe
from labkit.report import Comparison, Memory, Report, format_bytes


def report(seconds, *, peak=100, **fields):
    memory = Memory(
        peak_allocated_bytes=peak,
        by_phase={"before": 10, "forward": peak},
        by_owner={"weights": peak},
        timeline=[(10, "before"), (peak, "forward")],
    )
    return Report(
        Recipe(), memory=memory, step_seconds=seconds, real_tokens=[10] * len(seconds), **fields
    )


def test_the_ratio_is_the_median_of_neighbouring_pairs():
    # pairs: 2/1 = 2, 9/3 = 3, 4/4 = 1; the medians' own ratio would be 4/3
    comparison = Comparison(after=report([1, 3, 4]), before=report([2, 9, 4]))
    assert comparison.speed_ratios == [2, 3, 1]
    assert comparison.speed_ratio == 2
    assert comparison.speed_ratio_spread == (1.5, 2.5)


@pytest.mark.parametrize(
    ("faster", "slower", "clear"),
    [
        (8, 0, True),  # two-sided: 2 / 2**8
        (7, 1, False),  # 2 * (8 + 1) / 2**8 = 7 %
        (0, 6, True),  # 2 / 2**6 = 3.1 %
        (5, 0, None),  # 2 / 2**5 = 6.3 %: five pairs can never show anything
        (3, 0, None),
        (17, 3, True),  # published table of the sign test: 20 pairs, at most 5 against
        (14, 6, False),
    ],
)
def test_an_effect_is_clear_when_a_sign_test_says_so(faster, slower, clear):
    comparison = Comparison(
        after=report([1] * (faster + slower)), before=report([2] * faster + [0.5] * slower)
    )
    assert comparison.speed_change_is_clear == clear


def test_equal_times_are_no_clear_effect():
    assert Comparison(report([1] * 8), report([1] * 8)).speed_change_is_clear is False
    assert Comparison(report([1] * 8)).speed_change_is_clear is None


def test_tokens_per_second_are_those_of_real_tokens():
    assert report([1, 3]).real_tokens_per_second == 20 / 4


def test_compiling_is_paid_when_savings_reach_its_cost():
    # 11 - 1 seconds more than an ordinary step, 4 saved on each: 2.5 steps
    compiled = report([1, 1, 1], compile={"first_step_seconds": 11})
    assert Comparison(compiled, report([5, 5, 5])).steps_until_paid == 2.5
    assert Comparison(compiled, report([1, 1, 1])).steps_until_paid == float("inf")


def test_between_two_compiled_recipes_nothing_is_to_be_paid():
    compiled = report([1, 1], compile={"first_step_seconds": 11})
    assert Comparison(compiled, compiled).steps_until_paid is None


def test_what_was_not_measured_is_none_and_never_zero():
    empty = Comparison(after=Report(Recipe(), status="out_of_memory"), before=report([1, 2]))
    assert empty.speed_ratio is None
    assert empty.speed_ratio_spread is None
    assert empty.peak_change_bytes is None
    assert empty.after.median_step_seconds is None
    assert empty.after.real_tokens_per_second is None


def test_the_peak_changes_by_the_difference():
    comparison = Comparison(after=report([1], peak=70), before=report([1]))
    assert comparison.peak_change_bytes == -30


def test_a_comparison_survives_json():
    comparison = Comparison(after=report([1.5]), before=report([2.5], losses=[0.7]))
    text = json.dumps(comparison.to_dict())
    assert Comparison.from_dict(json.loads(text)) == comparison
    first = replace(comparison, before=None)
    assert Comparison.from_dict(json.loads(json.dumps(first.to_dict()))) == first


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (-3 * 2**20, "-3.0 MiB"),
        (5 * 2**29, "2.50 GiB"),
        (None, "not measured"),
    ],
)
def test_bytes_are_written_for_people(count, text):
    assert format_bytes(count) == text


def test_steps_on_different_pairs_are_compared_by_their_tokens():
    before = Report(Recipe(), step_seconds=[1.0, 1.0, 1.0], real_tokens=[100, 200, 300])
    after = Report(Recipe(), step_seconds=[0.5, 1.0, 1.0], real_tokens=[100, 100, 600])
    assert Comparison(after, before).speed_ratios == [2.0, 0.5, 2.0]
    after.real_tokens = before.real_tokens
    assert Comparison(after, before).speed_ratios == [2.0, 1.0, 1.0]
