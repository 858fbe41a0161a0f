"""``labkit validate``: real runs of tiny steps, stand-ins for a card, and what was kept."""

import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from samples import MACHINE, make_report
from typer.testing import CliRunner

from labkit import trial, validator
from labkit.cli import app
from labkit.model_source import ModelError, find_model, with_layers
from labkit.predict import local_card, recipe_trace
from labkit.predict.gpus import GPUS
from labkit.predict.published import PublishedRow, read_published
from labkit.recipe import PROFILES, ladder
from labkit.records import RecordError, to_json
from labkit.reference import REFERENCE, VALIDATIONS, load_references
from labkit.report import Fit
from labkit.shapes import BatchShape
from labkit.validation import BOUND, Row, Validation, load_validation, save_validation

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
STEPS = ladder(PROFILES["small"].recipe)
TINY_STEPS = ladder(PROFILES["tiny"].recipe)
BATCH = {"pairs": 32, "tokens": 64, "padded": True, "why": "the first batch"}
KEPT = [
    (path, row)
    for path in sorted(REFERENCE.glob(VALIDATIONS))
    for row in load_validation(path).rows
]


def invoke(*arguments):
    return CliRunner().invoke(app, ["validate", *map(str, arguments)])


def make_row(slug="00_baseline", measured=1000, predicted=1000, **values):
    values = {"batch": BATCH, "model": {"name": "qwen3-small"}} | values
    return Row(
        slug,
        make_report(STEPS[slug], measured, seconds=(), **values),
        make_report(STEPS[slug], predicted, seconds=(), oracle="predicted"),
    )


def make_validation(*rows):
    return Validation("small", None, MACHINE, rows=list(rows) or [make_row()])


# ---- rows


def test_an_error_is_predicted_less_measured():
    row = make_row(measured=1000, predicted=999)
    assert row.error_bytes == -(2**20)
    assert row.error == pytest.approx(-0.001)
    assert row.reserved_error_bytes is None
    assert row.owner_errors == {"activations": -(2**20)}


def test_owners_come_with_the_largest_difference_first():
    row = make_row()
    row.predicted.memory.by_owner |= {"weights": 8, "gradients": -9}
    assert list(row.owner_errors.items()) == [("gradients", -9), ("weights", 8)]


def test_a_card_tells_no_temporaries_from_activations():
    row = make_row()
    del row.measured.memory.by_owner["temporaries"]
    row.predicted.memory.by_owner["temporaries"] = 100
    row.predicted.memory.by_owner["activations"] -= 100
    assert row.owner_errors == {}


@pytest.mark.parametrize(
    ("slug", "device", "bound"),
    [("00_baseline", "cpu", BOUND), ("05_compile", "cpu", None), ("00_baseline", "cuda", None)],
)
def test_a_bound_counts_for_eager_steps_on_a_cpu(slug, device, bound):
    row = make_row(slug, predicted=2000, machine=MACHINE | {"device": device})
    assert row.bound == bound
    assert row.within is (False if bound else None)
    assert row.failed == bool(bound)


def test_a_half_that_is_missing_fails_and_out_of_memory_does_not():
    row = make_row(status="out_of_memory", memory=None)
    assert row.error is None
    assert not row.failed
    row.predicted, row.reason = None, "TraceError: no"
    assert row.failed
    assert make_row(status="error").failed


# ---- tiny steps that are run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The answer to a run of two steps, and the file it left."""
    path = tmp_path_factory.mktemp("validate") / "tiny.json"
    arguments = ("--step", "00_baseline", "--step", "02_checkpointing")
    result = invoke("--profile", "tiny", *arguments, "--out", path, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), json.loads(path.read_text(encoding="utf-8"))


def test_the_file_holds_the_answer(tiny):
    answer, file = tiny
    assert answer == file
    assert [row["slug"] for row in answer["rows"]] == ["00_baseline", "02_checkpointing"]
    assert answer["machine"]["versions"]["torch"]
    again = Validation.from_dict(answer).to_dict()
    assert json.loads(to_json(again)) == answer


def test_a_tiny_step_is_predicted_as_it_is_measured(tiny):
    for row in tiny[0]["rows"]:
        assert row["within"]
        assert row["measured"]["batch"] == row["predicted"]["batch"]
        assert row["measured"]["batch"]["tokens"] == 32
        assert (row["measured"]["oracle"], row["predicted"]["oracle"]) == (
            "measured", "predicted",
        )  # fmt: skip


def test_fewer_layers_are_measured_and_predicted(pairs):
    steps = {"01_freeze_base": TINY_STEPS["01_freeze_base"]}
    (row,) = validator.validate(steps, pairs, CPU, profile="tiny", layers=1).rows
    assert row.measured.model["name"] == "qwen3-tiny of 1 layer"
    assert row.measured.model == row.predicted.model
    assert row.within


def test_layers_that_a_model_lacks_are_refused():
    with pytest.raises(ModelError, match="from 1 to 2, not 3"):
        with_layers(find_model("qwen3-tiny"), 3)


@pytest.mark.parametrize(
    ("message", "status", "exit_code"),
    [("DefaultCPUAllocator: can't allocate memory", "out_of_memory", 0), ("no", "error", 1)],
)
def test_a_step_that_breaks_is_kept_and_the_next_one_runs(
    monkeypatch, message, status, exit_code
):
    def build(recipe, *arguments, **options):
        if recipe.train_base:
            raise RuntimeError(message)
        return build_step(recipe, *arguments, **options)

    build_step = trial.build_step
    monkeypatch.setattr(trial, "build_step", build)
    steps = ("--step", "00_baseline", "--step", "01_freeze_base")
    result = invoke("--profile", "tiny", *steps, "--json")
    first, second = json.loads(result.stdout)["rows"]
    assert result.exit_code == exit_code
    assert first["measured"]["status"] == status
    assert message in first["measured"]["reason"]
    assert first["predicted"]["memory"]["peak_allocated_bytes"] > 0
    assert second["within"]


def test_a_step_that_is_not_predicted_says_why(monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no rule\nfor it")

    monkeypatch.setattr(validator, "predict", fail)
    result = invoke("--profile", "tiny", "--step", "01_freeze_base")
    assert result.exit_code == 1
    assert "not predicted: RuntimeError: no rule" in result.stdout


def test_neither_jupyter_nor_papermill_is_imported():
    blocked = (
        "IPython", "ipykernel", "jupyter_client", "jupyter_core", "jupyterlab", "nbclient",
        "nbconvert", "nbformat", "papermill",
    )  # fmt: skip
    code = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Blocked())
from labkit.cli import app
app(["validate", "--profile", "tiny", "--step", "01_freeze_base"])
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "01_freeze_base" in done.stdout


# ---- a card that is not here


@pytest.fixture
def card(monkeypatch):
    """Stands in for a card; its name can be changed."""
    facts = SimpleNamespace(name="Tesla T4", major=7, minor=5, total_memory=12 * 2**30)
    for name, function in {
        "get_device_name": lambda: facts.name,
        "get_device_properties": lambda: facts,
        "mem_get_info": lambda: (10 * 2**30, 12 * 2**30),
        "memory_reserved": lambda: 2**30,
        "is_bf16_supported": lambda including_emulation: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return facts


def test_a_known_card_is_the_catalogues(card):
    assert local_card.local_card() is GPUS["t4"]
    assert local_card.is_known(GPUS["t4"])


def test_an_unknown_card_is_made_of_what_is_seen(card):
    card.name = "NVIDIA Abacus 12GB"
    gpu = local_card.local_card()
    assert not local_card.is_known(gpu)
    assert (gpu.name, gpu.capability, gpu.vendor) == (card.name, (7, 5), "nvidia")
    assert (gpu.memory_bytes, gpu.context_bytes) == (12 * 2**30, 2**30)
    assert gpu.native_dtypes == ("float32", "float16")
    assert math.isnan(gpu.bandwidth_bytes_per_second)


def test_the_allocators_setting_is_read(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv(
        "PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True"
    )
    assert local_card.has_expandable_segments()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    assert not local_card.has_expandable_segments()


@pytest.mark.parametrize(
    ("name", "known", "words"),
    [
        ("Tesla T4", True, "Predicted for NVIDIA T4 16GB"),
        ("NVIDIA Abacus 12GB", False, "NVIDIA Abacus 12GB is not in the catalogue"),
    ],
)
def test_on_a_card_memory_that_runs_out_is_a_result(
    card, monkeypatch, pairs, tmp_path, name, known, words
):
    def measure_row(trial):
        report = trial.report
        if trial.recipe.train_base:
            report.status, report.reason = "out_of_memory", "CUDA out of memory."
            return report
        report.memory = make_report(trial.recipe, 20).memory
        report.memory.peak_reserved_bytes = 24 * 2**20
        report.batch = trial.shape().to_dict()
        report.step_seconds, report.data_seconds = [0.15, 0.25, 0.35], [0.05] * 3
        return report

    card.name = name
    monkeypatch.setattr(validator, "measure_row", measure_row)
    monkeypatch.setattr("labkit.measure.usable_device", torch.device)
    path = tmp_path / "card.json"
    steps = ("--step", "00_baseline", "--step", "01_freeze_base")
    result = invoke("--profile", "tiny", *steps, "--device", "cuda", "--out", path)
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["card"]["known"] is known
    assert document["card"]["seen_outside_bytes"] == 2**30
    first, second = document["rows"]
    assert first["measured"]["status"] == "out_of_memory"
    assert first["error"] is None
    assert first["predicted"]["fit"]["fits"]
    assert second["bound"] is None
    assert second["reserved_error_bytes"] is not None
    assert (second["predicted"]["modelled"] is None) is not known
    text = " ".join(result.stdout.split())
    assert words in text
    assert "out of memory: CUDA out of memory" in text
    assert "predicted: fits" in text
    assert "200.0 ms" in text
    assert "Bound of" not in text


def test_what_does_not_fit_says_so(card):
    row = make_row(status="out_of_memory", memory=None, machine=MACHINE | {"device": "cuda"})
    row.predicted.fit = Fit(2**30, 2**20, -(2**20), False, fails_in="step 1, forward")
    from labkit.validation_words import row_words

    assert "predicted: does not fit, 1.0 MiB too little" in row_words(row)["What differs"]


def test_what_was_left_on_a_card_is_said(monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1024)
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: emptied.append(False), raising=False
    )
    report = make_report(STEPS["00_baseline"])
    validator._clear_card(report)
    assert emptied == [False, True]
    assert report.notes == ["1,024 bytes were allocated before the step was built"]


def test_a_device_without_a_peak_is_refused(pairs):
    with pytest.raises(validator.ValidationError, match="mps keeps no peak"):
        validator.validate(TINY_STEPS, pairs, torch.device("mps"), profile="tiny")


# ---- the command


@pytest.fixture
def stand_in(monkeypatch):
    """Answers in place of measuring and predicting; holds the rows to answer with."""
    rows, asked = [], {}

    def answer(steps, pairs, device, **options):
        asked.update(options, steps=steps, device=device)
        return make_validation(*rows)

    monkeypatch.setattr(validator, "validate", answer)
    return SimpleNamespace(rows=rows, asked=asked)


def test_the_table_says_which_bound_is_missed(stand_in):
    stand_in.rows += [make_row(), make_row("01_freeze_base", predicted=1002)]
    stand_in.rows += [make_row("05_compile", predicted=900)]
    result = invoke()
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert "01_freeze_base 1,000.0 MiB 1,002.0 MiB +2.0 MiB +0.2000 bound missed" in text
    assert "05_compile 1,000.0 MiB 900.0 MiB −100.0 MiB −10.0000 without compile" in text
    assert "missed by 01_freeze_base." in text


def test_options_reach_the_validation(stand_in):
    result = invoke("--batch-size", 4, "--layers", 2, "--no-compile", "--emulate")
    assert result.exit_code == 0
    assert list(stand_in.asked["steps"]) == list(STEPS)[:5]
    assert all(step.batch_size == 4 for step in stand_in.asked["steps"].values())
    assert (stand_in.asked["layers"], stand_in.asked["emulate"]) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--step", "03"], "03 is no step; the steps are 00_baseline"),
        (["--step", "05_compile", "--no-compile"], "no step is left"),
        (["--device", "tpu"], "device 'tpu': this machine has"),
        (["--out", "errors.txt"], "--out writes .json, not 'errors.txt'"),
        (["--profile", "tiny", "--layers", "3"], "layers must be from 1 to 2"),
    ],
)
def test_an_expected_error_is_one_sentence(arguments, sentence):
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert sentence in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(("factor", "exit_code"), [(1, 0), (2, 1)])
def test_published_figures_are_compared(monkeypatch, tmp_path, factor, exit_code):
    def compare(progress):
        progress("a row")
        return [
            PublishedRow(row, round(row.bytes * factor), "a note")
            for row in read_published().values()
        ]

    monkeypatch.setattr("labkit.predict.published.compare_published", compare)
    path = tmp_path / "published.json"
    result = invoke("--published", "--out", path)
    assert result.exit_code == exit_code
    text = " ".join(result.stdout.split())
    assert ("missed" in text) == bool(exit_code)
    assert "gpt2-fp32" in text
    assert "a note" in text
    rows = json.loads(path.read_text(encoding="utf-8"))["published"]
    assert len(rows) == len(read_published())
    assert {"id", "statistic", "card", "error", "bound", "within", "note"} <= rows[0].keys()
    answer = json.loads(invoke("--published", "--json").stdout)
    assert answer["published"] == rows


# ---- what is kept


def test_a_validation_comes_back_without_timelines(tmp_path):
    path = save_validation(make_validation(make_row(predicted=1000)), tmp_path)
    assert path.name == "abacus-2-cores-small-validate.json"
    kept = load_validation(path)
    assert kept.rows[0].measured.memory.timeline == []
    assert kept.rows[0].error == 0
    assert kept.rows[0].within
    assert load_references(tmp_path) == []


def test_layers_are_part_of_the_name(tmp_path):
    validation = make_validation()
    validation.profile, validation.layers = "0.6b", 4
    name = save_validation(validation, tmp_path).name
    assert name == "abacus-2-cores-0.6b-4-layers-validate.json"


def test_what_is_no_result_is_not_kept(tmp_path):
    tiny = make_validation()
    tiny.profile = "tiny"
    with pytest.raises(RecordError, match="tiny or empty"):
        save_validation(tiny, tmp_path)
    with pytest.raises(RecordError, match="00_baseline failed"):
        save_validation(make_validation(make_row(predicted=2000)), tmp_path)


@pytest.mark.parametrize("text", ["{", "3", "{}", '{"format": "labkit record 1"}'])
def test_a_damaged_file_is_named(tmp_path, text):
    path = tmp_path / "abacus-validate.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecordError, match=r"abacus-validate\.json"):
        load_validation(path)


def test_the_kept_errors_are_within_their_bounds():
    assert {path.name for path, _ in KEPT}
    assert all(row.within for _, row in KEPT if row.bound is not None)
    assert all(row.error is not None for _, row in KEPT)


def _quick(path, row):
    """Compiled steps are predicted as the step before; parts of a batch take long: once."""
    return not row.compiled and (row.measured.recipe.micro_batches == 1 or path == KEPT[0][0])


@pytest.mark.parametrize(
    ("path", "row"),
    [
        pytest.param(path, row, id=f"{path.stem}-{row.slug}")
        for path, row in KEPT
        if _quick(path, row)
    ],
)
def test_a_prediction_is_what_was_kept(monkeypatch, path, row):
    if row.measured.precision["reason"]:
        pytest.skip("a format that its machine lacked")
    kept = load_validation(path)
    here = validator.machine_facts("cpu")["versions"]
    for package in ("torch", "transformers", "peft"):
        there = kept.machine["versions"][package]
        if there.partition("+")[0] != here[package].partition("+")[0]:
            pytest.skip(f"kept with {package} {there}")
    # a timeline is the trace at every point (test_timeline.py), and for one point slower
    monkeypatch.setattr(recipe_trace, "has_timeline", lambda step: False)
    card = GPUS[kept.card["name"]] if kept.card.get("known") else None
    source = validator.model_of(row.measured.recipe, kept.layers)
    shape = BatchShape(**row.measured.batch)
    now = validator.predict_row(row, source, card, shape, emulate=True).memory
    then = row.predicted.memory
    assert (now.peak_allocated_bytes, now.by_owner) == (
        then.peak_allocated_bytes, then.by_owner,
    ), "predictions changed: measure again with labkit validate --save-reference"  # fmt: skip
