import pytest
from samples import STEPS, make_predicted, make_record, make_records

from labkit.captions import named_reports
from labkit.summary import report_summary
from labkit.table import effect_words, headings, markdown_table, row_words, table_rows


def rows_by_slug(records):
    return {row["slug"]: row for row in table_rows(records)}


def test_a_row_for_each_step_with_its_effect():
    rows = rows_by_slug(make_records())
    assert list(rows) == list(STEPS)
    row = rows["01_freeze_base"]
    assert row["change"] == "train_base: true → false"
    assert row["peak_allocated_bytes"] == 3000 * 2**20
    assert row["peak_change_bytes"] == -1000 * 2**20
    assert row["peak_change_share"] == -0.25
    assert row["speed_ratio"] == pytest.approx(1.25)
    assert effect_words(row) == "−25.0 % peak, 1.25× speed"
    assert row_words(row)["peak_change"] == "−25.0 % (−1,000.0 MiB)"
    assert row_words(rows["00_baseline"])["speed"] == "1.00× (start)"


def test_cumulative_speed_is_the_product_of_the_ratios():
    rows = rows_by_slug(make_records())
    assert rows["00_baseline"]["cumulative_speed_product"] == 1
    assert rows["03_amp"]["cumulative_speed_product"] == pytest.approx(1.25 * 0.8 * 2)


def test_no_effect_is_said():
    rows = rows_by_slug(make_records())
    assert effect_words(rows["04_accumulation"]).endswith("no clear change of speed")
    assert effect_words(rows["03_amp"]).startswith("same peak")
    assert row_words(rows["03_amp"])["peak_change"] == "the same, to the byte"


def test_what_was_not_measured_is_a_gap_with_a_reason_never_a_zero():
    records = make_records()
    records["05_compile"] = make_record(
        "05_compile", status="skipped", reason="no C++ compiler", memory=None, step_seconds=[]
    )
    del records["02_checkpointing"]
    rows = rows_by_slug(records)
    skipped, absent = rows["05_compile"], rows["02_checkpointing"]
    figures = [name for name in skipped if name not in ("slug", "change", "status", "note")]
    assert all(skipped[name] is None and absent[name] is None for name in figures)
    assert skipped["note"] == "skipped: no C++ compiler"
    assert absent["status"] == "not_run"
    assert row_words(skipped)["peak"] == "skipped"
    assert row_words(absent)["speed"] == "not measured"
    assert effect_words(absent) == "not run"
    assert rows["06_cached_data"]["cumulative_speed_product"] is None  # a factor is missing


def test_a_ratio_that_lacks_the_step_before_says_why():
    record = make_record()
    record.comparison.before.status, record.comparison.before.reason = (
        "out_of_memory",
        "too big",
    )
    record.comparison.before.memory, record.comparison.before.step_seconds = None, []
    row = rows_by_slug({"01_freeze_base": record})["01_freeze_base"]
    assert row["peak_allocated_bytes"] == 3000 * 2**20
    assert row["speed_ratio"] is None
    assert "the step before is not measured (out of memory: too big)" in row["note"]


def test_records_of_another_run_are_marked():
    records = make_records()
    records["03_amp"] = make_record("03_amp", "tiny", data={"sha256": "other"})
    assert (
        rows_by_slug(records)["03_amp"]["note"]
        == "of another profile and data than 00_baseline"
    )


def test_markdown_has_a_line_for_each_step_and_the_notes_below():
    text = markdown_table(table_rows({}))
    lines = text.splitlines()
    assert lines[0] == "| " + " | ".join(headings([]).values()) + " |"
    assert len([line for line in lines if line.startswith("| 0")]) == len(STEPS)
    assert lines[-1] == "- 07_no_padding: no record of this step"


def test_predictions_have_a_column_where_there_are_some():
    records = make_records()
    assert "Predicted peak (error)" not in markdown_table(table_rows(records))
    for slug in ("01_freeze_base", "05_compile"):
        make_predicted(records[slug].comparison, error_bytes=-3 * 2**20)
    rows = rows_by_slug(records)
    assert "| Predicted peak (error) |" in markdown_table(list(rows.values()))
    assert rows["01_freeze_base"]["predicted_error_bytes"] == -3 * 2**20
    words = {slug: row_words(row)["predicted"] for slug, row in rows.items()}
    assert words["00_baseline"] == "not predicted"
    assert words["01_freeze_base"] == "2.93 GiB (−3.0 MiB, −0.10\u00a0%)"
    assert words["05_compile"] == "897.0 MiB (not compiled)"


def test_summary_of_a_report_holds_what_was_measured():
    report = make_record().comparison.after
    summary = report_summary(report)
    assert summary["Status"] == "ok"
    assert summary["Peak memory"] == "2.93 GiB"
    assert summary["Time a step"] == "800.0 ms (quartiles 740.0 ms to 860.0 ms, 6 steps)"
    assert summary["Padding"] == "33% of the computed tokens"
    assert "Peak reserved" not in summary


def test_summary_of_a_failure_is_its_reason():
    record = make_record(status="out_of_memory", reason="too big", memory=None, step_seconds=[])
    summary = report_summary(record.comparison.after)
    assert summary["Status"] == "out of memory: too big"
    assert not any("memory" in name for name in summary)


def test_a_format_that_was_not_used_is_noted_at_its_own_step_only():
    unused = {"weights": "float32", "autocast": "none", "reason": "no instructions for it"}
    records = make_records()
    for slug in ("03_amp", "04_accumulation"):
        records[slug] = make_record(slug, precision=unused)
    rows = rows_by_slug(records)
    assert rows["03_amp"]["note"] == "no instructions for it"
    assert rows["04_accumulation"]["note"] == ""
    names = [name for name, _ in named_reports(records["03_amp"].comparison)]
    assert names == [
        "previous step (autocast=none)",
        "this step (autocast=bfloat16, not used here)",
    ]
