"""``labkit explore``: what it serves and refuses; test_explorer_browser opens the page."""

import socket

import nbformat
import pytest
from typer.testing import CliRunner

from labkit import cli_explore
from labkit.cli import app


def invoke(*arguments):
    return CliRunner().invoke(app, ["explore", *arguments])


@pytest.fixture
def served(monkeypatch):
    """Stands in for the serving; holds the cell that the page would be, port and no_browser."""
    found = {}

    def serve(notebook, port, no_browser):
        (cell,) = nbformat.read(notebook, as_version=4).cells
        found.update(cell=cell.source, port=port, no_browser=no_browser)
        found["kernels"] = [path.name for path in (notebook.parent / "kernels").iterdir()]

    monkeypatch.setattr(cli_explore, "_serve", serve)
    return found


def test_the_page_is_one_cell_in_a_kernel_of_this_interpreter(served):
    assert invoke("--gpu", "T4", "--model", "qwen3-tiny", "--port", "9123").exit_code == 0
    assert served["cell"].endswith("labkit.explore('qwen3-tiny', 't4')")
    assert (served["port"], served["no_browser"]) == (9123, False)
    assert served["kernels"] == [cli_explore.KERNEL]


def test_a_folder_is_found_from_wherever_the_kernel_runs(served, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    monkeypatch.chdir(tmp_path)
    assert invoke("--model", "model", "--no-browser").exit_code == 0
    assert repr(str(tmp_path / "model")) in served["cell"]
    assert served["no_browser"]


def test_a_port_that_is_taken_is_one_sentence(served):
    with socket.create_server(("localhost", 0)) as other:
        port = other.getsockname()[1]
        result = invoke("--port", str(port))
    assert result.exit_code == 1
    assert f"labkit: Port {port} is taken by another program." in result.stderr
    assert served == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu", "voodoo"), "'voodoo' is not in the catalogue"),
        (("--model", "no/such-model"), "no/such-model"),
    ],
)
def test_what_is_not_there_is_refused_before_the_page_opens(served, arguments, words):
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert words in result.stderr
    assert served == {}
