import pytest
from samples import make_predicted, make_record

from labkit import resume
from labkit.records import save_record
from labkit.resume import is_finished


@pytest.mark.parametrize(
    ("status", "finished"),
    [
        ("ok", True),
        ("out_of_memory", True),
        ("skipped", False),  # a compiler may be there by now
        ("error", False),
        ("interrupted", False),
    ],
)
def test_only_what_would_come_out_the_same_is_kept(tmp_path, monkeypatch, status, finished):
    monkeypatch.setattr(resume, "same_source", lambda *_: True)
    record = make_record(status=status)
    record.key = "k"
    save_record(tmp_path, record)
    notebook = tmp_path / "notebooks" / "01_freeze_base.ipynb"
    assert is_finished(notebook, tmp_path, "k", "t4") == finished
    assert not is_finished(notebook, tmp_path, "other inputs", "t4")
    assert not is_finished(notebook, tmp_path, None, "t4")


def test_what_was_predicted_for_another_card_is_done_again(tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "same_source", lambda *_: True)
    record = make_record()
    record.key = "k"
    make_predicted(record.comparison)
    save_record(tmp_path, record)
    notebook = tmp_path / "notebooks" / "01_freeze_base.ipynb"
    assert is_finished(notebook, tmp_path, "k", "rtx-4090")
    assert not is_finished(notebook, tmp_path, "k", "t4")
