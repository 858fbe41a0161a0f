import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat import v4
from samples import MACHINE

from labkit import resume, runner
from labkit.data import DataError
from labkit.execution import NotebookError
from labkit.predict.gpus import GpuError
from labkit.recipe import PROFILES
from labkit.records import load_record, load_records
from labkit.run_folder import RunnerError, newest_run, open_run_folder
from labkit.runner import run_course

DECLARED = 'profile = "small"\nrun_folder = "x"\ndata = None\nskip_bad = False\ngpu = "t4"'
PAIR = '{"sentence1": "怎么还款", "sentence2": "如何还款", "label": "1"}\n'

# What the course's notebooks do, with the keys that the test computed: measure and record.
SAVE = """
import json
from pathlib import Path
from labkit.recipe import ladder, profile_named
from labkit.records import Record, save_record
from labkit.report import Comparison, Report
recipe = ladder(profile_named(profile).recipe)["{slug}"]
key = json.loads(Path("keys.json").read_text())["{slug}"]
save_record(run_folder, Record("{slug}", profile, Comparison(Report(recipe)), key))
"""
SLEEP_ONCE = """
import os, time
if not Path("asleep").exists():
    Path("asleep").write_text(str(os.getpid()))
    time.sleep(600)
"""
RUN = """
import sys
from pathlib import Path
from labkit.runner import run_course
sys.exit(run_course("tiny", data=sys.argv[1], root=Path(sys.argv[2])).exit_status)
"""

executes = pytest.mark.notebook
posix = pytest.mark.skipif(os.name == "nt", reason="signals are those of POSIX")


class Lines:
    """A narrator that keeps what it says."""

    def __init__(self):
        from labkit.progress import Narrator

        self.said, self.narrator = [], Narrator()
        self.narrator.say = self.said.append

    def __str__(self):
        return "\n".join(self.said)


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A project of fixture notebooks; ``course.write`` adds one, ``course.run`` runs them."""
    monkeypatch.setattr(resume, "machine_facts", lambda: MACHINE)
    monkeypatch.setenv("PYTHONPATH", str(Path(runner.__file__).parent.parent))
    (tmp_path / "pairs.jsonl").write_text(PAIR, encoding="utf-8")
    (tmp_path / "notebooks").mkdir()
    return Course(tmp_path)


class Course:
    def __init__(self, root):
        self.root, self.data, self.folder = root, root / "pairs.jsonl", root / "runs" / "tiny"
        self.lines = Lines()

    def write(self, slug, *sources, declared=DECLARED, tags=("parameters",)):
        cells = [v4.new_code_cell(declared, metadata={"tags": list(tags)})]
        cells += [v4.new_code_cell(source.replace("{slug}", slug)) for source in sources]
        nbformat.write(v4.new_notebook(cells=cells), self.root / "notebooks" / f"{slug}.ipynb")

    def write_keys(self):
        from labkit.data import read_pairs

        keys = resume.step_keys(PROFILES["tiny"], read_pairs(self.data).sha256)
        (self.root / "notebooks" / "keys.json").write_text(json.dumps(keys), encoding="utf-8")

    def run(self, **options):
        defaults = {"data": str(self.data), "root": self.root, "narrator": self.lines.narrator}
        return run_course("tiny", **defaults | options)

    def start(self):
        """Run in another process until a cell sleeps; also returns its kernel's process."""
        command = [sys.executable, "-c", RUN, str(self.data), str(self.root)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        asleep = self.root / "notebooks" / "asleep"
        wait_until(lambda: asleep.exists() and asleep.read_text(), seconds=60)
        return process, psutil.Process(int(asleep.read_text()))

    def outputs(self, slug):
        executed = nbformat.read(self.folder / f"{slug}.ipynb", as_version=4)
        return "".join(o.get("text", "") for c in executed.cells for o in c.get("outputs", []))


def is_alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def test_nothing_starts_when_a_notebook_misspells_a_parameter(course):
    course.write("00_baseline", "1")
    course.write("01_freeze_base", "1", declared=DECLARED.replace("skip_bad", "skip_bda"))
    with pytest.raises(NotebookError, match=r"01_freeze_base\.ipynb .* skip_bad.* skip_bda"):
        course.run()
    assert not (course.root / "runs").exists()


def test_nothing_starts_when_a_notebook_has_no_tagged_cell(course):
    course.write("00_baseline", "1", tags=())
    with pytest.raises(NotebookError, match="tagged parameters"):
        course.run()
    assert not (course.root / "runs").exists()


def test_nothing_starts_without_the_data(course):
    course.write("00_baseline", "1")
    with pytest.raises(DataError, match="no such file"):
        course.run(data=str(course.root / "nothing.tsv"))
    assert not (course.root / "runs").exists()


def test_nothing_starts_with_an_unknown_card(course):
    course.write("00_baseline", "1")
    with pytest.raises(GpuError, match="'voodoo' is not in the catalogue"):
        course.run(gpu="voodoo")
    assert not (course.root / "runs").exists()


def test_an_unknown_slug_is_refused_with_those_that_exist(course):
    course.write("00_baseline", "1")
    with pytest.raises(RunnerError, match=r"no notebook 03_amp .* there are 00_baseline"):
        course.run(only=["03_amp"])


def test_a_course_without_notebooks_is_refused(course):
    with pytest.raises(RunnerError, match="no notebook at all"):
        course.run()


def test_a_file_where_the_runs_should_be_is_one_sentence(course):
    course.write("00_baseline", "1")
    (course.root / "runs").write_text("in the way", encoding="utf-8")
    with pytest.raises(RunnerError, match=r"Cannot write to \S+runs \("):
        course.run()


def test_a_folder_that_may_not_be_written_is_one_sentence(course, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    course.write("00_baseline", "1")
    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(RunnerError, match=r"Cannot write to \S+tiny \(Permission denied\)"):
        course.run()
    assert not list((course.root / "runs").glob("*.lock"))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "/tmp", ".hidden", "a b"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path, name):
    with (
        pytest.raises(RunnerError, match="--name must be"),
        open_run_folder(tmp_path, name, keep=False, say=print),
    ):
        pass


def test_two_runs_do_not_share_a_folder(tmp_path):
    with (
        open_run_folder(tmp_path, "small", keep=True, say=print),
        pytest.raises(RunnerError, match="Another run is writing"),
        open_run_folder(tmp_path, "small", keep=True, say=print),
    ):
        pass
    with open_run_folder(tmp_path, "small", keep=True, say=print):
        pass


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path):
    (tmp_path / "small.lock").write_text(json.dumps([os.getpid(), 1.0]), encoding="utf-8")
    with open_run_folder(tmp_path, "small", keep=True, say=print) as folder:
        assert folder == tmp_path / "small"


def test_an_unreadable_lock_is_left_to_the_user(tmp_path):
    (tmp_path / "small.lock").write_text("", encoding="utf-8")
    with (
        pytest.raises(RunnerError, match=r"delete \S+small\.lock"),
        open_run_folder(tmp_path, "small", keep=True, say=print),
    ):
        pass


def test_an_earlier_run_is_renamed_not_deleted(tmp_path):
    said = []
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "00_baseline.json").write_text("{}", encoding="utf-8")
    with open_run_folder(tmp_path, "small", keep=False, say=said.append) as folder:
        assert not list(folder.iterdir())
    kept = next(tmp_path.glob("small-until-*"))
    assert (kept / "00_baseline.json").exists()
    assert str(kept) in said[0]
    assert newest_run(tmp_path) == kept


def test_no_run_to_report_is_one_sentence(tmp_path):
    with pytest.raises(RunnerError, match="no run in"):
        newest_run(tmp_path)


@executes
def test_a_failure_and_a_death_are_recorded_and_the_rest_goes_on(course):
    course.write("00_baseline", "import sys; print(sys.executable, profile, data, gpu)")
    course.write("01_freeze_base", "print('before')", "raise ValueError('two\\nlines')")
    course.write("02_checkpointing", "import os; os._exit(3)")
    course.write("90_ladder", "print(run_folder)")
    result = course.run()
    assert [n.outcome for n in result.notebooks] == ["ok", "error", "error", "ok"]
    assert result.exit_status == 1
    assert course.outputs("00_baseline") == f"{sys.executable} tiny {course.data} rtx-4090\n"
    assert course.outputs("01_freeze_base") == "before\n"
    assert course.outputs("90_ladder") == f"{course.folder}\n"
    records = load_records(course.folder)
    assert {slug: record.status for slug, record in records.items()} == {
        "01_freeze_base": "error",
        "02_checkpointing": "error",
    }
    assert "cell In [4]: ValueError: two." in str(course.lines)
    assert str(course.folder / "01_freeze_base.ipynb") in str(course.lines)
    assert "died in cell 3, exit code 3" in records["02_checkpointing"].comparison.after.reason
    assert len(list(course.folder.glob("*.html"))) == 5
    assert not list((course.root / "runs").glob("*.lock"))


@executes
@posix
def test_a_kernel_killed_when_memory_is_short_ran_out_of_memory(course, monkeypatch):
    monkeypatch.setattr("labkit.progress.free_memory_bytes", lambda: 2**20)
    course.write("00_baseline", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    result = course.run()
    assert result.exit_status == 0
    after = load_record(course.folder / "00_baseline.json").comparison.after
    assert after.status == "out_of_memory"
    assert "killed the kernel in cell 3: 1.0 MiB of" in after.reason


@executes
def test_resume_keeps_what_is_finished_and_repeats_what_changed(course):
    course.write("00_baseline", SAVE)
    course.write("01_freeze_base", SAVE)
    course.write_keys()
    assert course.run().exit_status == 0
    first = load_records(course.folder)
    course.write("01_freeze_base", SAVE, "print('changed')")
    result = course.run(resume=True)
    assert [n.outcome for n in result.notebooks] == ["kept", "ok"]
    assert "[1/2] 00_baseline: kept, same inputs" in course.lines.said
    assert load_records(course.folder)["00_baseline"] == first["00_baseline"]
    assert (course.folder / "01_freeze_base.json.previous").exists()
    (course.folder / "00_baseline.json").write_text("{", encoding="utf-8")
    course.data.write_text(PAIR * 2, encoding="utf-8")
    assert [n.outcome for n in course.run(resume=True).notebooks] == ["ok", "ok"]


@executes
@posix
def test_kill_9_leaves_no_kernel_and_resume_completes_the_run(course):
    course.write("00_baseline", SAVE)
    course.write("01_freeze_base", SAVE.replace("save_record(", SLEEP_ONCE + "save_record("))
    course.write_keys()
    process, kernel = course.start()
    process.kill()
    process.communicate()
    wait_until(lambda: not is_alive(kernel), seconds=10)
    result = course.run(resume=True)
    assert [n.outcome for n in result.notebooks] == ["kept", "ok"]
    assert list(load_records(course.folder)) == ["00_baseline", "01_freeze_base"]


@executes
@posix
def test_ctrl_c_keeps_valid_records_and_ends_the_kernel(course):
    course.write("00_baseline", SAVE)
    course.write("01_freeze_base", "from pathlib import Path", SLEEP_ONCE)
    course.write("02_checkpointing", "1")
    course.write_keys()
    process, kernel = course.start()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    wait_until(lambda: not is_alive(kernel), seconds=10)
    statuses = {slug: record.status for slug, record in load_records(course.folder).items()}
    assert statuses == {"00_baseline": "ok", "01_freeze_base": "interrupted"}
    assert "--resume" in said
    assert (course.folder / "index.html").exists()
