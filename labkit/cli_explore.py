"""``labkit explore``: the explorer as a page of its own."""

import logging
import os
import socket
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from labkit.cli_options import LabGroup, examples

KERNEL = "labkit-explore"

app = typer.Typer(cls=LabGroup, rich_markup_mode="rich")


class PortError(ValueError):
    """A port that is taken; the message says what to do."""


@app.command(
    epilog=examples(
        "labkit explore",
        "labkit explore --gpu t4 --model Qwen/Qwen3-Embedding-4B",
        "labkit explore --model my-model/config.json --port 9000 --no-browser",
    )
)
def explore(
    model: Annotated[
        str | None,
        typer.Option(help="Geometry, local folder, config.json or hub id to start with."),
    ] = None,
    gpu: Annotated[
        str, typer.Option(metavar="NAME", help="The card to start with, see predict.")
    ] = "rtx-4090",
    port: Annotated[
        int, typer.Option(min=1024, max=65535, help="Where the page is, on this machine only.")
    ] = 8866,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Print the address, and open nothing.")
    ] = False,
) -> None:
    """Move sliders in a browser and see what fits, without Jupyter; Ctrl-C ends it.

    The page is the explorer of notebook 09, and can measure on this machine as that does. With
    ?theme=dark at the end of its address it is dark.
    """
    from labkit.model_source import find_model
    from labkit.predict.gpus import find_gpu

    card = find_gpu(gpu).name
    if model:
        find_model(model)
        model = str(Path(model).resolve()) if Path(model).exists() else model
    _check_port(port)
    with TemporaryDirectory(prefix="labkit-explore-") as folder:
        notebook = _write_notebook(Path(folder), model, card)
        _serve(notebook, port, no_browser)


def _check_port(port: int) -> None:
    """Refuse a port where another program answers, before the server takes time to start."""
    try:
        socket.create_connection(("localhost", port), timeout=1).close()
    except OSError:
        return
    raise PortError(f"Port {port} is taken by another program. Choose one with --port.")


def _write_notebook(folder: Path, model: str | None, gpu: str) -> Path:
    """The notebook that the page is, and a kernel of this very interpreter to run it."""
    import nbformat
    from ipykernel.kernelspec import write_kernel_spec
    from nbformat import v4

    write_kernel_spec(folder / "kernels" / KERNEL, extra_arguments=["--log-level=CRITICAL"])
    cell = v4.new_code_cell(f"import labkit\n\nlabkit.explore({model!r}, {gpu!r})")
    kernel = {"name": KERNEL, "display_name": "Python 3", "language": "python"}
    notebook = folder / "labkit explore.ipynb"
    nbformat.write(v4.new_notebook(cells=[cell], metadata={"kernelspec": kernel}), notebook)
    return notebook


def _serve(notebook: Path, port: int, no_browser: bool) -> None:
    """Serve the notebook as a page until Ctrl-C."""
    from voila.app import Voila

    os.environ["JUPYTER_PATH"] = os.pathsep.join(
        [str(notebook.parent), *os.environ.get("JUPYTER_PATH", "").split(os.pathsep)]
    )
    # A page that is closed asks for the end of its kernel without the token that the server
    # wants. So kernels that nobody is connected to are ended here, and the refusals not told.
    logging.getLogger("tornado").setLevel(logging.ERROR)
    options = ["--MappingKernelManager.cull_idle_timeout=30"]
    options += ["--MappingKernelManager.cull_interval=10", "--Voila.log_level=ERROR"]
    options += [f"--port={port}", "--Voila.port_retries=0", *["--no-browser"] * no_browser]
    typer.echo(f"The explorer is at http://localhost:{port}/ until Ctrl-C.")
    Voila.launch_instance([str(notebook), *options])
