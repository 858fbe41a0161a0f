import json
import re
from html import unescape
from html.parser import HTMLParser

import pytest
from samples import make_predicted, make_record, make_records

from labkit import page
from labkit.page import write_page
from labkit.records import RecordError, save_record
from labkit.reference import load_references, save_reference


class Links(HTMLParser):
    """What a page refers to, and the texts that replace its images."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.targets, self.alts, self.ids = set(), [], [], set()
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.add(tag)
        self.targets += [values[name] for name in ("href", "src") if name in values]
        self.alts += [values.get("alt")] if tag == "img" else []
        self.ids.add(values.get("id"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run folder with all records, figures and a notebook; there is no reference run."""
    monkeypatch.setattr(page, "load_references", lambda: [])
    for record in make_records().values():
        save_record(tmp_path, record)
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "03_amp-peaks.png").write_bytes(b"image")
    (tmp_path / "figures" / "90_ladder-ladder.png").write_bytes(b"image")
    (tmp_path / "figures" / "09_plan_your_gpu-explorer.png").write_bytes(b"image")
    (tmp_path / "figures" / "08_lora_choice-gradients.png").write_bytes(b"image")
    (tmp_path / "08_lora_choice.html").write_text("notebook", encoding="utf-8")
    (tmp_path / "09_plan_your_gpu.html").write_text("notebook", encoding="utf-8")
    (tmp_path / "03_amp.html").write_text("notebook", encoding="utf-8")
    return tmp_path


def read(folder):
    return write_page(folder).read_text(encoding="utf-8")


def test_everything_that_the_page_refers_to_is_beside_it(folder):
    links = Links(read(folder))
    assert "figures/03_amp-peaks.png" in links.targets
    assert "figures/90_ladder-ladder.png" in links.targets
    assert "figures/09_plan_your_gpu-explorer.png" in links.targets
    assert "figures/08_lora_choice-gradients.png" in links.targets
    notebooks = {"03_amp.html", "08_lora_choice.html", "09_plan_your_gpu.html"}
    assert notebooks <= set(links.targets)
    for target in links.targets:
        assert target[1:] in links.ids if target[0] == "#" else (folder / target).exists()
    assert not {"script", "link", "iframe"} & links.tags
    assert "url(" not in read(folder)


def test_the_page_says_in_words_what_each_step_did(folder):
    text = unescape(read(folder))
    assert "−25.0 % peak, 1.25× speed" in text
    assert "peak memory 3.91 GiB → 700.0 MiB (−82%), 8.25 times as fast" in text
    assert "Abacus, 2 cores" in text
    assert "torch 2.13.0" in text
    assert "abc1234" in text


def test_predictions_stand_beside_what_was_measured(folder):
    assert "Predicted peak" not in read(folder)
    record = make_record("03_amp")
    make_predicted(record.comparison)
    save_record(folder, record)
    text = unescape(read(folder))
    assert "Predicted peak (error)" in text
    assert "1.46 GiB (exact)" in text


def test_figures_have_their_alternative_text(folder):
    (folder / "figures" / "alt.json").write_text(
        json.dumps({"03_amp-peaks.png": 'Bars "3" <4>'}), encoding="utf-8"
    )
    assert sorted(Links(read(folder)).alts) == [
        'Bars "3" <4>',
        "Figure of 08_lora_choice",
        "Figure of 09_plan_your_gpu",
        "Figure of 90_ladder",
    ]


def test_a_tiny_run_is_no_result(folder):
    assert "not a result" not in read(folder)
    save_record(folder, make_record("03_amp", "tiny"))
    assert "tiny: for tests, not a result" in read(folder)


def test_texts_from_records_are_escaped(folder):
    save_record(
        folder,
        make_record("05_compile", status="skipped", reason="<b>no & compiler</b>", memory=None),
    )
    assert "<b>no" not in read(folder)
    assert "&lt;b&gt;no &amp; compiler" in read(folder)


def test_an_empty_run_has_a_page_too(tmp_path):
    text = read(tmp_path)
    assert "Nothing was measured" in text
    assert len(re.findall("no record of this step", text)) == 8


def test_the_reference_is_named_and_compared(folder, tmp_path_factory, monkeypatch):
    references = tmp_path_factory.mktemp("reference")
    save_reference(make_records(), references)
    monkeypatch.setattr(page, "load_references", lambda: load_references(references))
    text = read(folder)
    assert "Against the reference run on Abacus, 2 cores" in text
    assert "03_amp: peak equal to the reference, to the byte" in text


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_damaged_alternative_texts_name_the_file(folder, text):
    (folder / "figures" / "alt.json").write_text(text, encoding="utf-8")
    with pytest.raises(RecordError, match=r"alt\.json is damaged"):
        write_page(folder)
