"""The course's notebooks: their order and their words here, and, marked, a whole run."""

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from solutions import SOLUTIONS, ladder_product

from labkit.exercises import EXERCISES, WrongAnswer, check_answer, judge
from labkit.findings import SPECIAL, findings, ladder_findings, speed_product
from labkit.recipe import ladder, profile_named
from labkit.records import load_records
from labkit.runner import PARAMETERS, run_course

PROJECT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((PROJECT / "notebooks").glob("*.ipynb"))
STEPS = list(ladder(profile_named("tiny").recipe))
HEADINGS = (
    "## Idea",
    "## Your guess, and a prediction",
    "## How it is done",
    "## Run",
    "## Plot",
    "## What you saw",
    "## What could mislead",
    "## Exercise",
)
TYPED_FIGURE = re.compile(r"\d\s*(GiB|GB|MiB|MB|KiB|kB|ms|s|seconds|%|×|tok/s)(?!\w)")


@pytest.fixture(params=NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def test_there_is_a_notebook_for_each_step_and_three_that_are_none():
    others = ["08_lora_choice", "09_plan_your_gpu", "90_ladder"]
    assert [path.stem for path in NOTEBOOKS] == [*STEPS, *others]


def test_every_step_has_findings_an_exercise_and_a_solution():
    assert list(SPECIAL) == list(EXERCISES) == list(SOLUTIONS) == STEPS


def test_sections_come_in_the_fixed_order(notebook):
    text = [c.source for c in notebook.cells if c.cell_type == "markdown"]
    assert text[0].startswith("# ")
    assert "**Question.**" in text[0]
    headings = [line for cell in text for line in cell.splitlines() if line.startswith("## ")]
    assert tuple(headings) == HEADINGS


def test_the_parameters_are_tagged_second_and_are_the_runners(notebook):
    tagged = [
        i for i, c in enumerate(notebook.cells) if "parameters" in c.metadata.get("tags", [])
    ]
    assert tagged == [1]
    values = {}
    exec(notebook.cells[1].source, {}, values)
    assert tuple(values)[: len(PARAMETERS)] == PARAMETERS
    assert values["profile"] == "small"


def test_outputs_are_stripped(notebook):
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert not any(c.outputs or c.execution_count for c in code)


def test_cells_are_short(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert len(cell.source.splitlines()) <= 15
        elif cell.source.startswith("## Idea"):
            assert len(cell.source.split()) <= 150


def test_no_measured_figure_is_typed(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            assert not TYPED_FIGURE.search(cell.source), cell.source


def test_what_could_mislead_has_at_most_three_points(notebook):
    cell = next(c for c in notebook.cells if c.source.startswith("## What could mislead"))
    assert 1 <= cell.source.count("\n- ") <= 3


def test_no_cell_stands_twice(notebook):
    assert len({c.source for c in notebook.cells}) == len(notebook.cells)


@pytest.fixture(scope="module")
def course():
    """All notebooks, executed in the tiny profile."""
    folder = PROJECT / "runs" / "test-notebooks"
    shutil.rmtree(folder, ignore_errors=True)
    yield run_course("tiny", name=folder.name)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.notebook
def test_the_whole_course_runs(course):
    assert [(n.slug, n.outcome, n.reason) for n in course.notebooks] == [
        (path.stem, "ok", "") for path in NOTEBOOKS
    ]
    records = load_records(course.folder)
    assert list(records) == STEPS
    for slug, record in records.items():
        assert record.comparison.after.status in ("ok", "skipped"), slug
    peaks = {s: r.comparison.after.memory.peak_allocated_bytes for s, r in records.items()}
    assert peaks["01_freeze_base"] < peaks["00_baseline"]
    assert peaks["02_checkpointing"] < peaks["01_freeze_base"]
    assert peaks["04_accumulation"] < peaks["03_amp"]
    assert course.page.is_file()


@pytest.mark.notebook
def test_a_step_measures_the_bytes_that_the_step_before_recorded(course):
    records = list(load_records(course.folder).values())
    for before, after in pairwise(records):
        again = after.comparison.before
        if again.ok and before.comparison.after.ok and again.recipe.compile == "none":
            first = before.comparison.after.memory
            assert again.memory.peak_allocated_bytes == first.peak_allocated_bytes, after.slug


@pytest.mark.notebook
def test_every_figure_has_an_alternative_text_in_the_html(course):
    texts = json.loads((course.folder / "figures" / "alt.json").read_text(encoding="utf-8"))
    for slug in [path.stem for path in NOTEBOOKS]:
        html = (course.folder / f"{slug}.html").read_text(encoding="utf-8")
        images = re.findall(r"<img[^>]*>", html)
        figures = list((course.folder / "figures").glob(f"{slug}-*.png"))
        assert len(images) == len(figures) > 0
        assert all(re.search(r'alt="[^"]{40,}"', image) for image in images), slug
        assert all(figure.name in texts for figure in figures)


@pytest.mark.notebook
@pytest.mark.parametrize("slug", STEPS)
def test_exercises_take_the_right_answer_and_refuse_a_wrong_one(course, slug):
    comparison = load_records(course.folder)[slug].comparison
    run = SimpleNamespace(after=comparison.after.recipe)
    if not comparison.after.ok:
        pytest.skip(f"not measured here: {comparison.after.reason}")
    right = SOLUTIONS[slug](run, comparison)
    assert check_answer(slug, right, comparison).startswith("Right")
    with pytest.raises(WrongAnswer, match="is not it"):
        check_answer(slug, right * 1.5 + 1, comparison)


@pytest.mark.notebook
def test_the_ladders_exercise_takes_the_product(course):
    comparisons = {s: r.comparison for s, r in load_records(course.folder).items()}
    right = ladder_product(SimpleNamespace(comparisons=comparisons))
    assert judge(right, speed_product(comparisons), "").startswith("Right")


@pytest.mark.notebook
def test_findings_are_sentences_with_figures(course):
    records = load_records(course.folder)
    for slug, record in records.items():
        sentences = findings(slug, record.comparison)
        assert len(sentences) >= 3
        assert all(re.search(r"\w.*\.$", sentence) for sentence in sentences)
        assert any(re.search(r"\d", sentence) for sentence in sentences)
    summary = " ".join(ladder_findings({s: r.comparison for s, r in records.items()}))
    assert "Peak memory went from" in summary
