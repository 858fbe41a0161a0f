from html import unescape

import nbformat
import pytest
from nbformat import v4

from labkit.execution import NotebookError, check_parameters, export_html, same_source

NAMES = ("profile", "run_folder", "data", "skip_bad")
DECLARED = 'profile = "small"\nrun_folder = "x"\ndata: str | None = None\nskip_bad = False'
IMAGE = "aW1hZ2U="


def write(path, *sources, tags=("parameters",)):
    """A notebook whose first cell has the tags."""
    cells = [v4.new_code_cell(source) for source in sources]
    cells[0].metadata["tags"] = list(tags)
    nbformat.write(v4.new_notebook(cells=cells), path)
    return path


def test_a_notebook_that_declares_all_parameters_is_accepted(tmp_path):
    check_parameters(write(tmp_path / "03_amp.ipynb", DECLARED), NAMES)


def test_a_missing_tag_is_refused(tmp_path):
    path = write(tmp_path / "03_amp.ipynb", DECLARED, tags=())
    with pytest.raises(NotebookError, match=r"03_amp\.ipynb needs one code cell tagged param"):
        check_parameters(path, NAMES)


def test_a_misspelt_parameter_is_refused(tmp_path):
    path = write(tmp_path / "03_amp.ipynb", DECLARED.replace("profile", "proflie"))
    with pytest.raises(NotebookError, match=r"not declare the parameter profile.*proflie"):
        check_parameters(path, NAMES)


def test_a_parameters_cell_that_is_no_python_is_refused(tmp_path):
    path = write(tmp_path / "03_amp.ipynb", "profile = ")
    with pytest.raises(NotebookError, match="parameters cell is no Python"):
        check_parameters(path, NAMES)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": 1}'])
def test_a_damaged_notebook_is_refused(tmp_path, text):
    path = tmp_path / "03_amp.ipynb"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(NotebookError, match=r"03_amp\.ipynb cannot be read as a notebook"):
        check_parameters(path, NAMES)


def test_a_missing_notebook_is_refused(tmp_path):
    with pytest.raises(NotebookError, match="cannot be read"):
        check_parameters(tmp_path / "03_amp.ipynb", NAMES)


@pytest.mark.parametrize(
    ("state", "source", "same"),
    [
        ({"end_time": "now", "exception": None}, "1 + 1", True),
        ({"end_time": None, "exception": None}, "1 + 1", False),  # the runner was killed
        ({"end_time": "now", "exception": True}, "1 + 1", False),
        ({"end_time": "now", "exception": None}, "1 + 2", False),
        ({}, "1 + 1", False),
    ],
)
def test_an_executed_notebook_counts_when_it_is_whole_and_of_these_cells(
    tmp_path, state, source, same
):
    path = write(tmp_path / "now.ipynb", DECLARED, "1 + 1")
    executed = v4.new_notebook(
        metadata={"papermill": state},
        cells=[
            v4.new_code_cell(DECLARED),
            v4.new_code_cell("profile = 1", metadata={"tags": ["injected-parameters"]}),
            v4.new_code_cell(source),
        ],
    )
    nbformat.write(executed, tmp_path / "executed.ipynb")
    assert same_source(path, tmp_path / "executed.ipynb") is same


def test_html_needs_no_other_file_and_keeps_alternative_texts(tmp_path):
    output = v4.new_output(
        "display_data", {"image/png": IMAGE}, metadata={"image/png": {"alt": 'Bars, "3" & <4>'}}
    )
    notebook = v4.new_notebook(
        cells=[v4.new_markdown_cell("# Peak $b^2$"), v4.new_code_cell("1", outputs=[output])],
    )
    path = tmp_path / "03_amp.ipynb"
    nbformat.write(notebook, path)
    html = export_html(path).read_text(encoding="utf-8")
    assert "<script" not in html
    assert "<link" not in html
    assert "@import" not in html
    assert 'src="http' not in html
    assert "url(http" not in html
    assert IMAGE in html
    assert 'Bars, "3" & <4>' in unescape(html)
