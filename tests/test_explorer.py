import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from solutions import largest_batch_traced

from labkit import explorer as explorer_module
from labkit import explorer_answer, explorer_measure
from labkit.exercises import UNANSWERED, WrongAnswer
from labkit.exploration import check_largest_batch, open_explorer
from labkit.explorer import Explorer
from labkit.explorer_answer import answer, largest_batch, predicted
from labkit.explorer_measure import ExplorerError, measure_here
from labkit.explorer_picture import message, picture
from labkit.explorer_plots import plot_explorer
from labkit.explorer_setting import LENGTHS, PARTS, Setting, SettingError
from labkit.explorer_words import (
    alt_explorer,
    findings,
    markdown_table,
    measured_words,
    segments,
    summary,
    verdict,
)
from labkit.predict.gpus import GIB, MIB, find_gpu
from labkit.predict.prediction import predict
from labkit.recipe import differences
from labkit.report import format_bytes
from labkit.shapes import BatchShape

T4 = find_gpu("t4")
SMALL_CARD = replace(T4, memory_bytes=GIB // 2)
TINY = Setting(model="qwen3-tiny", gpu=T4)


@pytest.fixture(scope="module")
def found():
    return answer(TINY)


@pytest.fixture
def explorer():
    return Explorer(TINY)


def bars(html):
    """The widths of the bar's parts in percent, from the left."""
    root = ET.fromstring(html)
    bar = next(svg for svg in root.iter("svg") if svg.get("class") == "labkit-bar")
    return [float(rect.get("width").rstrip("%")) for rect in bar.iter("rect")]


def test_the_answer_is_that_of_the_oracle(found):
    shape = BatchShape(TINY.batch_size, TINY.max_length, padded=True)
    report = predict(TINY.recipe, T4, shape=shape)
    assert found.report.memory.by_owner == report.memory.by_owner
    assert found.report.memory.peak_reserved_bytes == report.memory.peak_reserved_bytes
    assert found.report.fit == report.fit


def test_a_curve_holds_the_peaks_that_the_reports_name(found):
    for pairs, count in found.over_batch[::3]:
        report = predicted(replace(TINY, batch_size=pairs).recipe, T4)
        assert count == report.memory.peak_allocated_bytes
    for tokens, count in found.over_length[::4]:
        report = predicted(replace(TINY, max_length=tokens).recipe, T4)
        assert count == report.memory.peak_allocated_bytes


def test_the_parts_of_the_bar_are_as_long_as_the_report_has_bytes(found):
    memory, fit = found.report.memory, found.report.fit
    idle = memory.peak_reserved_bytes - memory.peak_allocated_bytes
    counts = [*memory.by_owner.values(), idle, fit.context_bytes]
    assert [count for _, count in segments(found.report)] == counts
    widths = bars(picture(found))
    assert [w / sum(widths) for w in widths] == pytest.approx(
        [count / sum(counts) for count in counts], abs=1e-4
    )


@pytest.mark.parametrize("gpu", [T4, SMALL_CARD, replace(T4, memory_bytes=GIB), None])
@pytest.mark.parametrize("batch_size", [1, 512])
def test_the_picture_is_well_formed_and_says_its_verdict(gpu, batch_size):
    found = answer(replace(TINY, gpu=gpu, batch_size=batch_size))
    root = ET.fromstring(picture(found))
    assert " ".join(verdict(found.report)) in "".join(root.itertext())
    assert summary(found) in "".join(root.itertext())
    for svg in root.iter("svg"):
        if svg.get("role") == "img":
            assert svg.find("title").text
    fills = {rect.get("fill") for rect in root.iter("rect")}
    names = {f"url(#{pattern.get('id')})" for pattern in root.iter("pattern")}
    assert {fill for fill in fills if fill.startswith("url")} <= names


def test_a_verdict_has_a_sign_besides_its_colour(found):
    assert verdict(found.report)[0] == "✔"
    none = replace(found.report, fit=replace(found.report.fit, fits=False, margin_bytes=-MIB))
    assert verdict(none) == ("✖", "does not fit, 1.0 MiB too little")
    tight = replace(found.report, fit=replace(found.report.fit, gives_back_cache=True))
    assert verdict(tight)[0] == "▲"


def test_a_message_is_escaped():
    assert ET.fromstring(message("a < b & c")).find("p").text == "a < b & c"


@pytest.mark.parametrize(
    ("field", "value", "changed"),
    [
        ("model", "qwen3-small", {"model": ("qwen3-tiny", "qwen3-small")}),
        ("batch_size", 64, {"batch_size": (32, 64)}),
        ("max_length", 128, {"max_length": (64, 128)}),
        ("checkpoint_every", 2, {"checkpoint_every": (0, 2)}),
        ("micro_batches", 4, {"micro_batches": (1, 4)}),
        ("precision", "16-bit weights", {"weights": ("float32", "float16")}),
        ("precision", "float32 + autocast", {"autocast": ("none", "float16")}),
        ("gpu", find_gpu("h100"), {}),
    ],
)
def test_each_control_changes_the_field_it_names(explorer, field, value, changed):
    explorer._controls[field].value = value.name if field == "gpu" else value
    assert differences(TINY.recipe, explorer.setting.recipe) == changed
    assert getattr(explorer.setting, field) == value


def test_this_machine_is_a_choice_too(explorer):
    explorer._controls["gpu"].value = explorer_module.HERE
    assert explorer.setting == replace(TINY, gpu=None)
    assert explorer._controls["gpu"].label == "This machine's CPU"


def test_a_card_with_bfloat16_gets_it():
    setting = replace(TINY, gpu=find_gpu("a10"), precision="16-bit weights + autocast")
    assert (setting.recipe.weights, setting.recipe.autocast) == ("bfloat16", "bfloat16")


def test_the_batch_can_always_be_divided_into_the_parts(explorer):
    batch = explorer._controls["batch_size"]
    for parts in (*PARTS, 8, 1):
        explorer._controls["micro_batches"].value = parts
        assert (batch.min, batch.step) == (parts, parts)
        assert batch.value % parts == 0
        assert batch.value == explorer.setting.batch_size
    explorer._controls["micro_batches"].value = 4
    batch.value = 33  # typed into the slider's number
    assert (batch.value, explorer.setting.batch_size) == (32, 32)


def test_a_change_is_one_redraw(explorer, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        explorer_module, "picture", lambda *arguments: drawn.append(arguments) or "<p/>"
    )
    explorer._controls["micro_batches"].value = 64  # moves the batch, too
    assert len(drawn) == 1
    explorer._controls["batch_size"].value = 128
    assert len(drawn) == 2


def test_a_long_wait_is_announced(explorer, monkeypatch):
    shown = []
    explorer._picture.observe(lambda change: shown.append(change["new"]), "value")
    monkeypatch.setattr(explorer_module, "PATIENCE_SECONDS", 0)
    slow = lambda setting: explorer_module.Timer(0.1, print).run() or answer(setting)  # noqa: E731
    monkeypatch.setattr(explorer_module, "answer", slow)
    explorer._controls["batch_size"].value = 40
    assert ["Working out" in html for html in shown] == [True, False]


def test_a_model_that_cannot_be_had_is_one_sentence():
    explorer = Explorer(replace(TINY, model="no/such-model"))
    assert "no/such-model" in explorer._picture.value
    assert "Traceback" not in explorer._picture.value


def test_what_is_exported_without_a_kernel_is_the_picture(explorer):
    bundle = explorer._repr_mimebundle_()
    assert "fits" in bundle["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in bundle


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 0}, "from 1 to 512, not 0"),
        ({"batch_size": 6, "micro_batches": 4}, "6 pairs cannot be split into 4 equal parts"),
        ({"max_length": 500}, "500 is not one of the explorer's lengths; the nearest is 512"),
        ({"precision": "int8"}, "not 'int8'"),
    ],
)
def test_choices_that_make_no_batch_are_refused(changes, words):
    with pytest.raises(SettingError, match=words):
        replace(TINY, **changes)


def test_lengths_are_multiples_of_eight_that_grow():
    assert all(length % 8 == 0 for length in LENGTHS)
    assert list(LENGTHS) == sorted(set(LENGTHS))
    assert (LENGTHS[0], LENGTHS[-1]) == (16, 8192)


def test_words_table_and_alternative_text_name_the_figures(found):
    peak = format_bytes(found.report.memory.peak_allocated_bytes)
    for text in (summary(found), markdown_table(found), alt_explorer(found)):
        assert peak in text
    assert "| Verdict | ✔ fits" in markdown_table(found)
    sentences = findings(found, 512)
    assert len(sentences) >= 3
    assert all(sentence.endswith(".") for sentence in sentences)
    assert "none at all" in findings(found, 0)[2]


def test_the_static_figure_has_the_bar_and_both_curves(found):
    bar, over_batch, over_length = plot_explorer(found)
    drawn = [patch.get_width() for patch in bar.patches]
    assert drawn == [count for _, count in segments(found.report)]
    for ax, points in ((over_batch, found.over_batch), (over_length, found.over_length)):
        assert [tuple(point) for point in ax.lines[0].get_xydata()] == points
    assert bar.get_title(loc="left").startswith("Fits, ")


def test_a_course_gets_figure_and_table_instead_of_controls(tmp_path, capsys):
    sitting = open_explorer(gpu="t4", run_folder=str(tmp_path), model="qwen3-tiny")
    assert sitting.explorer is None
    sitting.guess(32)
    sitting.predict()
    sitting.explore()
    sitting.show()
    sitting.say()
    texts = json.loads((tmp_path / "figures" / "alt.json").read_text(encoding="utf-8"))
    assert list(texts) == ["09_plan_your_gpu-explorer.png"]


def test_the_exercise_takes_the_largest_batch_and_no_other():
    setting = replace(TINY, gpu=SMALL_CARD, max_length=512)
    right = largest_batch_traced(setting)
    assert 1 < right < 512
    assert largest_batch(setting) == right
    assert check_largest_batch(setting, right).startswith("Right")
    assert check_largest_batch(setting, None) == UNANSWERED
    for wrong in (right - 1, right + 1):
        with pytest.raises(WrongAnswer, match="is not it"):
            check_largest_batch(setting, wrong)


def test_no_batch_fits_where_even_one_pair_does_not():
    assert largest_batch(replace(TINY, gpu=replace(T4, memory_bytes=160 * MIB))) == 0


def test_a_measurement_is_told_beside_its_prediction(found):
    measured = replace(
        found.report,
        step_seconds=[1.0, 2.0, 3.0],
        memory=replace(found.report.memory, peak_allocated_bytes=1000),
    )
    expected = replace(
        found.report, memory=replace(found.report.memory, peak_allocated_bytes=904)
    )
    words = measured_words(expected, measured)
    assert "predicted for it was 96 bytes less than that. A step took 2.00 s." in words
    assert "exactly that" in measured_words(measured, measured)
    short = replace(measured, batch={"tokens": 16, "padded": False})
    assert "nothing was padded" in measured_words(expected, short)
    assert words in "".join(ET.fromstring(picture(found, (expected, measured))).itertext())


def test_what_has_no_room_here_is_refused_before_it_starts(monkeypatch):
    monkeypatch.setattr(explorer_answer, "free_memory_bytes", lambda: MIB)
    monkeypatch.setattr(explorer_measure, "card_here", lambda: None)
    with pytest.raises(ExplorerError, match=r"are needed at the peak, and 1\.0 MiB are free"):
        measure_here(TINY.recipe, print)


class Ended:
    """A process that said something and ended."""

    def __init__(self, said, status):
        self.stderr, self.status = said, status

    def __call__(self, command, *, stdout, **options):
        self.command = command
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait(self):
        return self.status

    def kill(self):
        pass


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        (["labkit: model x: no.\n"], 1, "Not measured: model x: no."),
        (["timed step 1\n"], -9, "most likely out of memory"),
    ],
)
def test_a_measurement_that_fails_is_one_sentence(monkeypatch, said, status, words):
    ended = Ended(said, status)
    monkeypatch.setattr(explorer_measure, "Popen", ended)
    monkeypatch.setattr(explorer_measure, "card_here", lambda: None)
    with pytest.raises(ExplorerError, match=words):
        measure_here(TINY.recipe, lambda text: None)
    command = " ".join(ended.command)
    assert "--model qwen3-tiny --batch-size 32" in command
    assert "--no-train-base" in command
    assert "--lora-targets q_proj,k_proj,v_proj" in command


def test_the_button_is_there_again_after_a_failure(explorer, monkeypatch):
    def refuse(recipe, progress):
        progress("trying <this>")
        raise ExplorerError("Not measured: no.")

    monkeypatch.setattr(explorer_module, "measure_here", refuse)
    explorer._measure(TINY.recipe)
    assert explorer._status.value == "Not measured: no."
    assert not explorer._button.disabled
