import json
from dataclasses import replace
from pathlib import Path

import pytest
from samples import MACHINE, make_predicted, make_record

from labkit import records
from labkit.recipe import PROFILES, ladder
from labkit.records import (
    RecordError,
    input_key,
    load_record,
    load_records,
    save_record,
)


def test_record_comes_back_as_it_was_saved(tmp_path):
    saved = make_record()
    saved.key = "k"
    path = save_record(tmp_path, saved)
    assert path == tmp_path / "01_freeze_base.json"
    assert load_record(path) == saved
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # no draft is left


def test_predictions_come_back_with_their_record(tmp_path):
    saved = make_record()
    make_predicted(saved.comparison, error_bytes=-96)
    assert load_record(save_record(tmp_path, saved)) == saved


def test_a_record_from_before_there_were_predictions_is_read(tmp_path):
    path = save_record(tmp_path, make_record())
    document = json.loads(path.read_text(encoding="utf-8"))
    del document["comparison"]["predicted"]
    path.write_text(json.dumps(document), encoding="utf-8")
    assert load_record(path).comparison.predicted == {}


def test_record_holds_no_number_that_json_does_not_know(tmp_path):
    saved = make_record(losses=[0.5, float("nan"), float("inf")])
    text = save_record(tmp_path, saved).read_text(encoding="utf-8")

    def refuse(constant):
        raise AssertionError(constant)

    assert json.loads(text, parse_constant=refuse)["comparison"]["after"]["losses"] == [
        0.5,
        None,
        None,
    ]


def test_crash_while_writing_keeps_the_old_record(tmp_path, monkeypatch):
    old = make_record()
    save_record(tmp_path, old)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        save_record(tmp_path, make_record(losses=[1.0]))
    assert load_records(tmp_path) == {old.slug: old}


def test_records_come_in_the_order_of_the_course(tmp_path):
    for slug in ("06_cached_data", "00_baseline", "03_amp"):
        save_record(tmp_path, make_record(slug))
    (tmp_path / ".00_baseline.json.99.tmp").write_text("{", encoding="utf-8")
    assert list(load_records(tmp_path)) == ["00_baseline", "03_amp", "06_cached_data"]


def test_no_run_is_one_sentence(tmp_path):
    with pytest.raises(RecordError, match=r"no run in .*labkit run"):
        load_records(tmp_path / "nothing")


def test_missing_record_is_one_sentence(tmp_path):
    with pytest.raises(RecordError, match=r"no record .*03_amp\.json"):
        load_record(tmp_path / "03_amp.json")


def test_truncated_record_names_the_file_and_the_cure(tmp_path):
    path = save_record(tmp_path, make_record())
    path.write_text(path.read_text(encoding="utf-8")[:200], encoding="utf-8")
    with pytest.raises(RecordError, match=r"01_freeze_base\.json is damaged .*--resume"):
        load_records(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": "labkit record 0"}', "null", "3"])
def test_foreign_json_names_the_file_and_the_cure(tmp_path, text):
    (tmp_path / "03_amp.json").write_text(text, encoding="utf-8")
    with pytest.raises(RecordError, match=r"03_amp\.json is not a labkit record"):
        load_records(tmp_path)


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "settings.json").write_text("{}", encoding="utf-8")
    assert load_records(tmp_path) == {}


@pytest.mark.parametrize(
    ("path", "value"), [(("status",), "weird"), (("memory", "peak_allocated_bytes"), None)]
)
def test_a_record_with_a_value_that_cannot_be_is_no_record(tmp_path, path, value):
    file = save_record(tmp_path, make_record())
    document = json.loads(file.read_text(encoding="utf-8"))
    place = document["comparison"]["after"]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    file.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(RecordError, match="is not a labkit record"):
        load_record(file)


def test_key_depends_on_every_input():
    steps = ladder(PROFILES["tiny"].recipe)
    inputs = {
        "before": steps["00_baseline"],
        "after": steps["01_freeze_base"],
        "profile": PROFILES["tiny"],
        "data_sha256": "d",
        "machine": MACHINE,
    }
    others = {
        "before": None,
        "after": replace(steps["01_freeze_base"], seed=1),
        "profile": replace(PROFILES["tiny"], timed_steps=4),
        "data_sha256": "e",
        "machine": MACHINE | {"versions": MACHINE["versions"] | {"torch": "2.12.0"}},
    }
    keys = {input_key(**inputs)} | {
        input_key(**inputs | {name: value}) for name, value in others.items()
    }
    assert input_key(**inputs) in keys
    assert len(keys) == 1 + len(others)


def test_key_depends_on_the_code_that_measures_and_on_no_other(tmp_path, monkeypatch):
    imports = {
        "measure": "step",
        "step": "report",
        "report": "recipe",
        "recipe": "",
        "page": "",
    }
    for module, imported in imports.items():
        text = f"from labkit.{imported} import x\n" if imported else ""
        (tmp_path / f"{module}.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(records, "__file__", str(tmp_path / "records.py"))

    def code_after(change):
        with (tmp_path / f"{change}.py").open("a", encoding="utf-8") as file:
            file.write("# changed\n")
        records._code_sha256.cache_clear()
        return records._code_sha256()

    first = code_after("page")
    assert code_after("page") == first
    assert code_after("recipe") != first
    records._code_sha256.cache_clear()
