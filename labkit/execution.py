"""One notebook, executed by papermill in a kernel of this very interpreter; and as HTML."""

import ast
import logging
from collections.abc import Callable
from pathlib import Path

OFFLINE_PAGE = """{% extends "lab/index.html.j2" %}
{% block html_head_js %}{% endblock %}
{% block jupyter_widgets %}{% endblock %}
{% block html_head_js_mathjax %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
{% block extra_css %}<style>.jp-OutputArea-output .highlight pre {
white-space: pre; overflow-x: auto;
font: var(--jp-code-font-size)/var(--jp-code-line-height) var(--jp-code-font-family) }</style>
{% endblock %}
{% block data_png %}<div class="jp-RenderedImage jp-OutputArea-output"><img
src="data:image/png;base64,{{ output.data['image/png'] }}"
alt="{{ (output | get_metadata('alt', 'image/png') or 'Figure') | escape_html }}"></div>
{% endblock %}"""


class NotebookError(ValueError):
    """A notebook that the runner cannot use; the message names it and what is wrong."""


class CellFailed(Exception):
    """A cell raised; the message is its number and the exception's first line."""


class KernelDied(Exception):
    """The kernel ended in the middle of a cell.

    Attributes:
        exit_code: Of the kernel's process; negative is the signal that ended it.
    """

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"the kernel died (exit code {exit_code})")
        self.exit_code = exit_code


def read_notebook(path: Path):
    """The notebook in a file.

    Raises:
        NotebookError: It is missing or no notebook.
    """
    import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except (OSError, ValueError, TypeError, AttributeError, nbformat.ValidationError) as error:
        raise NotebookError(f"{path} cannot be read as a notebook: {error}") from error


def check_parameters(path: Path, names: tuple[str, ...]) -> None:
    """Make sure that a notebook takes each parameter that will be passed.

    papermill itself only warns, and then the notebook runs with its own values.

    Raises:
        NotebookError: No cell is tagged ``parameters``, or a name is not assigned in it.
    """
    cells = [
        cell
        for cell in read_notebook(path).cells
        if "parameters" in cell.metadata.get("tags", [])
    ]
    if len(cells) != 1 or cells[0].cell_type != "code":
        raise NotebookError(
            f"{path} needs one code cell tagged parameters, not {len(cells)}. In JupyterLab, "
            "select the cell that assigns the parameters; Property Inspector, Add Tag."
        )
    declared = _assigned_names(path, cells[0].source)
    missing = [name for name in names if name not in declared]
    if missing:
        raise NotebookError(
            f"{path} does not declare the parameter {', '.join(missing)}: its parameters cell "
            f"declares {', '.join(declared)}. Is a name misspelt?"
        )


def _assigned_names(path: Path, source: str) -> list[str]:
    """The names that a parameters cell assigns."""
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise NotebookError(f"{path}: the parameters cell is no Python ({error}).") from error
    targets = []
    for statement in statements:
        targets += getattr(statement, "targets", []) or [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def same_source(path: Path, executed: Path) -> bool:
    """Whether ``executed`` is a complete run of the cells that ``path`` holds now."""
    original, run = read_notebook(path), read_notebook(executed)
    state = run.metadata.get("papermill", {})
    cells = [
        cell for cell in run.cells if "injected-parameters" not in cell.metadata.get("tags", [])
    ]
    complete = state.get("end_time") and not state.get("exception")
    return bool(complete) and [c.source for c in original.cells] == [c.source for c in cells]


def execute(
    path: Path,
    output: Path,
    parameters: dict,
    *,
    on_cell: Callable[[int], None] = lambda number: None,
) -> None:
    """Run a notebook; ``output`` is written after each cell and kept whatever happens.

    Args:
        path: The notebook. Its folder is the working directory.
        output: The executed notebook.
        parameters: Values by name, see ``check_parameters``.
        on_cell: Told the number of each code cell before it runs, as in ``In [3]``.

    Raises:
        CellFailed: A cell raised.
        KernelDied: The kernel ended.
    """
    import papermill
    from papermill.engines import papermill_engines

    logging.getLogger("papermill").addHandler(logging.NullHandler())  # we say it ourselves
    papermill_engines.register("labkit", _engine(on_cell))
    try:
        papermill.execute_notebook(
            str(path),
            str(output),
            parameters,
            engine_name="labkit",
            kernel_name="python3",
            language="python",
            progress_bar=False,
            cwd=str(path.parent),
        )
    except papermill.PapermillExecutionError as error:
        first_line = f"{error.ename}: {error.evalue}".splitlines()[0]
        raise CellFailed(f"cell In [{error.exec_count}]: {first_line}") from error


def _engine(on_cell: Callable[[int], None]):
    """Papermill's engine with the kernel of this interpreter, telling which cell runs."""
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager
    from nbclient.exceptions import DeadKernelError
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.engines import NBClientEngine

    class SameInterpreter(AsyncKernelManager):
        """Ignores installed kernels: one named python3 may belong to another environment."""

        @property
        def kernel_spec(self) -> KernelSpec:
            return KernelSpec(
                **get_kernel_dict(["--log-level=CRITICAL"]),
                env={"PYDEVD_DISABLE_FILE_VALIDATION": "1"},  # a warning about debuggers
            )

    class Client(PapermillNotebookClient):
        def execute_cell(self, cell, *args, **options):
            if cell.cell_type == "code":
                on_cell(self.code_cells_executed + 1)
            return super().execute_cell(cell, *args, **options)

    class Engine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man, kernel_name, **options):
            client = Client(nb_man, kernel_name=kernel_name, startup_timeout=60)
            client.km = kernel = SameInterpreter(kernel_name=kernel_name)
            try:
                client.execute()
            except BaseException as error:
                nb_man.nb.metadata.papermill["exception"] = True  # else it looks complete
                if isinstance(error, DeadKernelError):
                    raise KernelDied(kernel.provisioner.process.poll()) from error
                raise

    return Engine


def export_html(path: Path) -> Path:
    """Write an executed notebook as HTML that needs no other file and no network."""
    from jinja2 import DictLoader
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(
        extra_loaders=[DictLoader({"offline.html.j2": OFFLINE_PAGE})],
        template_file="offline.html.j2",
    )
    html, _ = exporter.from_filename(str(path))
    page = path.with_suffix(".html")
    page.write_text(html, encoding="utf-8")
    return page
