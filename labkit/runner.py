"""The course from end to end: each notebook executed, each outcome recorded, one page made."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from labkit.execution import (
    CellFailed,
    KernelDied,
    check_parameters,
    execute,
    export_html,
    read_notebook,
)
from labkit.machine import PROJECT, memory_bytes
from labkit.page import write_page
from labkit.predict.gpus import find_gpu
from labkit.progress import Narrator, Watch
from labkit.recipe import Profile, ladder, profile_named
from labkit.records import Record, save_record
from labkit.report import Comparison, Report, format_bytes
from labkit.resume import is_finished, step_keys
from labkit.run_folder import RunnerError, open_run_folder
from labkit.summary import facts_text

# Every notebook declares them.
PARAMETERS = ("profile", "run_folder", "data", "skip_bad", "gpu")


@dataclass
class NotebookResult:
    """What became of one notebook.

    ``outcome`` is ``ok``, ``kept`` (finished earlier), ``error``, ``out_of_memory`` (it killed
    the kernel) or ``interrupted``.
    """

    slug: str
    outcome: str
    seconds: float = 0.0
    reason: str = ""


@dataclass
class RunResult:
    """What became of a run: ``page`` is its HTML report."""

    folder: Path
    notebooks: list[NotebookResult] = field(default_factory=list)
    page: Path | None = None

    @property
    def exit_status(self) -> int:
        """0, 1 when a notebook failed, 130 after Ctrl-C; out of memory is no failure."""
        outcomes = {notebook.outcome for notebook in self.notebooks}
        return 130 if "interrupted" in outcomes else int("error" in outcomes)


def run_course(
    profile: str = "small",
    *,
    name: str | None = None,
    data: str | None = None,
    skip_bad: bool = False,
    gpu: str = "rtx-4090",
    resume: bool = False,
    only: Iterable[str] = (),
    root: Path = PROJECT,
    narrator: Narrator | None = None,
) -> RunResult:
    """Execute the notebooks in order and leave records, executed notebooks and a page.

    Everything that can be refused is refused before the first notebook starts. A notebook that
    fails is recorded and the rest goes on.

    Args:
        profile: Name of the profile.
        name: Of the folder below ``<root>/runs``; the profile's name by default.
        data: Pairs to train on, anything that ``read_pairs`` takes.
        skip_bad: Leave out rows of the data that cannot be used.
        gpu: The card that each step is predicted for, besides this machine.
        resume: Keep what is finished for the same inputs in an existing folder.
        only: Slugs to run, in an existing folder; all by default.
        root: The project: holds ``notebooks/`` and ``runs/``.
        narrator: Tells what is happening.

    Raises:
        RunnerError: Nothing can be written, or another run is writing there.
        NotebookError: A notebook takes other parameters than ``PARAMETERS``, or is missing.
        DataError: The data cannot be used.
        GpuError: No card of that name.
    """
    from labkit.data import read_pairs

    chosen, narrator = profile_named(profile), narrator or Narrator()
    card = find_gpu(gpu).name
    notebooks = course_notebooks(root / "notebooks", tuple(only))
    for notebook in notebooks:
        check_parameters(notebook, PARAMETERS)
    if data and Path(data).exists():
        data = str(Path(data).resolve())
    pairs = read_pairs(data, skip_bad=skip_bad)
    keys = step_keys(chosen, pairs.sha256) if resume else {}
    with open_run_folder(
        root / "runs", name or profile, keep=resume or bool(only), say=narrator.say
    ) as folder:
        values = (profile, str(folder), data, skip_bad, card)
        narrator.say(f"{len(notebooks)} notebooks; data: {facts_text(pairs.facts())}")
        course = Course(chosen, folder, dict(zip(PARAMETERS, values, strict=True)), narrator)
        result = RunResult(folder)
        for number, notebook in enumerate(notebooks, 1):
            if is_finished(notebook, folder, keys.get(notebook.stem), card):
                outcome = NotebookResult(notebook.stem, "kept")
            else:
                outcome = course.run(notebook)
            result.notebooks.append(outcome)
            narrator.say(f"[{number}/{len(notebooks)}] {_line(outcome)}")
            if outcome.outcome == "interrupted":
                narrator.say("What is finished is kept. Go on: the same command and --resume")
                break
        result.page = write_page(folder)
    return result


def course_notebooks(folder: Path, only: tuple[str, ...] = ()) -> list[Path]:
    """The notebooks of the course in order, or those of ``only``.

    Raises:
        RunnerError: A slug of ``only`` names none, or there are none at all.
    """
    notebooks = {path.stem: path for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}
    unknown = [slug for slug in only if slug not in notebooks]
    if unknown or not notebooks:
        raise RunnerError(
            f"There is no notebook {', '.join(unknown) or 'at all'} in {folder}; "
            f"there are {', '.join(notebooks) or 'none'}."
        )
    return [path for slug, path in notebooks.items() if not only or slug in only]


@dataclass
class Course:
    """What all notebooks of a run share."""

    profile: Profile
    folder: Path
    parameters: dict
    narrator: Narrator

    def run(self, notebook: Path) -> NotebookResult:
        """Execute one notebook and record what it could not record itself."""
        slug, output = notebook.stem, self.folder / notebook.name
        record = self.folder / f"{slug}.json"
        if record.exists():
            record.replace(record.with_suffix(".json.previous"))
        cells = 1 + sum(cell.cell_type == "code" for cell in read_notebook(notebook).cells)
        outcome, reason = "ok", ""
        with self.narrator.watch(slug, cells) as watch:
            try:
                execute(notebook, output, self.parameters, on_cell=watch.enter)
            except CellFailed as error:
                outcome, reason = "error", f"{error}. The notebook is kept in {output}"
            except KernelDied as error:
                outcome, reason = _explain_death(error, watch)
            except KeyboardInterrupt:
                outcome, reason = "interrupted", f"Ctrl-C in cell {watch.cell}"
        if outcome != "ok" and not record.exists():
            self.record_failure(slug, outcome, reason)
        if outcome != "interrupted":
            export_html(output)
        return NotebookResult(slug, outcome, watch.seconds, reason)

    def record_failure(self, slug: str, status: str, reason: str) -> None:
        """Write the record of a step that nothing was measured of."""
        steps = ladder(self.profile.recipe)
        if slug not in steps:
            return
        slugs = list(steps)
        before = slugs[slugs.index(slug) - 1] if slug != slugs[0] else None
        comparison = Comparison(
            after=Report(steps[slug], status=status, reason=reason),
            before=before and Report(steps[before], status="skipped", reason="not measured"),
        )
        save_record(self.folder, Record(slug, self.profile.name, comparison))


def _explain_death(error: KernelDied, watch: Watch) -> tuple[str, str]:
    """The status and the reason of a step whose kernel died."""
    total, least = memory_bytes(), watch.least_free_bytes
    free = f"{format_bytes(least)} of {format_bytes(total)} memory was free at the lowest"
    if error.exit_code == -9 and least < total / 4:  # SIGKILL: a system out of memory sends it
        return "out_of_memory", (
            f"the system killed the kernel in cell {watch.cell}: {free}. Close other programs "
            "or choose a smaller --profile"
        )
    return "error", f"the kernel died in cell {watch.cell}, exit code {error.exit_code}; {free}"


def _line(result: NotebookResult) -> str:
    """One line about a notebook."""
    words = {"ok": f"done in {result.seconds:.0f} s", "kept": "kept, same inputs"}
    outcome = words.get(result.outcome, result.outcome.replace("_", " "))
    return f"{result.slug}: {outcome}" + (f": {result.reason}" if result.reason else "")
