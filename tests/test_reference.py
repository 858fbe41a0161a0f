from dataclasses import replace

import pytest
from samples import MACHINE, make_predicted, make_record, make_records

from labkit.records import RecordError
from labkit.reference import (
    compare_with_reference,
    load_references,
    nearest_reference,
    save_reference,
)


def sentence(mine, theirs=None):
    (only,) = compare_with_reference({"r": mine}, {"r": theirs or make_record()})
    return only


def test_a_reference_comes_back_without_timelines(tmp_path):
    path = save_reference(make_records(), tmp_path)
    assert path.name == "abacus-2-cores-small.json"
    (reference,) = load_references(tmp_path)
    assert list(reference) == list(make_records())
    assert reference["03_amp"].comparison.after.memory.timeline == []
    assert len(compare_with_reference(make_records(), reference)) == 8


def test_a_reference_keeps_what_was_predicted(tmp_path):
    records = make_records()
    make_predicted(records["03_amp"].comparison)
    save_reference(records, tmp_path)
    (reference,) = load_references(tmp_path)
    kept = reference["03_amp"].comparison.predicted["card"].after
    assert kept.memory.peak_reserved_bytes == 5100 * 2**20
    assert kept.memory.timeline == []


def test_a_tiny_run_is_no_reference(tmp_path):
    with pytest.raises(RecordError, match="no reference"):
        save_reference(make_records("tiny"), tmp_path)


def test_an_empty_run_is_no_reference(tmp_path):
    with pytest.raises(RecordError, match="no reference"):
        save_reference({}, tmp_path)


def test_a_run_with_a_failed_step_is_no_reference(tmp_path):
    records = make_records() | {"03_amp": make_record("03_amp", machine={})}
    with pytest.raises(RecordError, match="03_amp was not measured"):
        save_reference(records, tmp_path)


@pytest.mark.parametrize("text", ["{", "3", "{}", "[1]", '[{"slug": "03_amp"}]'])
def test_a_damaged_reference_names_the_file(tmp_path, text):
    (tmp_path / "abacus.json").write_text(text, encoding="utf-8")
    with pytest.raises(RecordError, match=r"abacus\.json"):
        load_references(tmp_path)


def test_equal_bytes_and_a_ratio_inside_the_band():
    assert sentence(make_record()) == (
        "r: peak equal to the reference, to the byte; "
        "speed ratio 1.25, inside the band 1.00 to 1.56."
    )


def test_a_first_step_has_no_ratio():
    first = make_record("00_baseline")
    assert "no speed ratio, it is the first step" in sentence(first, first)


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        (
            {"machine": MACHINE | {"device_name": "Abacus 2"}},
            "device name Abacus 2 here, Abacus",
        ),
        ({"machine": MACHINE | {"cpu_capability": "AVX2"}}, "cpu capability AVX2 here, AVX512"),
        (
            {"machine": MACHINE | {"versions": MACHINE["versions"] | {"torch": "2.14.0"}}},
            "torch 2.14.0 here, 2.13.0 there",
        ),
        ({"data": {"sha256": "e"}}, "other data"),
        ({}, "nothing that would explain it was found"),
    ],
)
def test_other_bytes_are_explained(values, cause):
    mine = make_record(**values)
    mine.comparison.after.memory.peak_allocated_bytes += 2**20
    assert f"peak 1.0 MiB above the reference ({cause}" in sentence(mine)


def test_another_recipe_is_an_explanation():
    mine = make_record()
    mine.comparison.after.memory.peak_allocated_bytes -= 2**20
    mine.comparison.after.recipe = replace(mine.comparison.after.recipe, batch_size=16)
    assert "1.0 MiB below the reference (batch_size 16 here, 32 there)" in sentence(mine)


def test_what_was_not_measured_is_not_compared():
    mine = make_record(status="out_of_memory", memory=None, step_seconds=[])
    assert "peak not compared" in sentence(mine)
    assert "speed not compared" in sentence(mine)


def test_a_ratio_outside_the_band_is_said():
    mine = make_record()
    mine.comparison.after.step_seconds = [10.0, 10.0, 10.0]
    assert "outside the band 1.00 to 1.56" in sentence(mine)


def test_the_reference_is_of_the_same_profile_and_the_most_similar_machine():
    other = make_records()
    other["00_baseline"].comparison.after.machine = MACHINE | {"device": "cuda", "cpu": "Z80"}
    same = make_records()
    assert nearest_reference(make_records(), [other, same]) is same
    assert nearest_reference(make_records("0.6b"), [other, same]) is None
    assert nearest_reference({}, [same]) is None
