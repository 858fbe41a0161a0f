import re
import subprocess
from pathlib import Path

import pytest

from labkit.reference import load_references
from labkit.table import markdown_table, table_rows

ROOT = Path(__file__).parent.parent
PIN = re.compile(r"^(?:\s*- )?([\w-]+==[\w.]+)", re.MULTILINE)
TREE_LINE = re.compile(r"^([\s│├└─]*)((?:[\w.-]+/?)(?:, [\w.-]+/?)*)(?:\s{2,}.*)?$")


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def pins(name):
    return PIN.findall(text(name))


def tracked_files():
    git = ["git", "-C", str(ROOT), "ls-files"]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.splitlines()


def readme_tree():
    """The paths of README's tree, a fenced block with one or more names in a line.

    Names in a line are separated by commas; two spaces or more begin a description. What is
    indented is inside the folder above it.
    """
    block = next(
        b for b in re.findall(r"```\w*\n(.*?)```", text("README.md"), re.S) if "labkit/" in b
    )
    parents, paths = [], []
    for line in filter(str.strip, block.splitlines()):
        found = TREE_LINE.match(line)
        assert found, f"not a line of a tree: {line}"
        while parents and parents[-1][0] >= len(found[1]):
            parents.pop()
        folder = parents[-1][1] if parents else ""
        paths += [folder + name for name in found[2].split(", ")]
        if paths[-1].endswith("/"):
            parents.append((len(found[1]), paths[-1]))
    return paths


def test_environment_has_the_pins_of_requirements():
    assert pins("environment.yml") == pins("requirements.txt") != []


def test_every_requirement_is_pinned():
    for name in ("requirements.txt", "requirements-dev.txt"):
        lines = [line.split("#")[0].strip() for line in text(name).splitlines()]
        wanted = [line for line in lines if line and not line.startswith("-r")]
        assert pins(name) == wanted


@pytest.mark.parametrize(
    ("hook", "package"), [("nbstripout", "nbstripout"), ("ruff-pre-commit", "ruff")]
)
def test_hooks_have_the_pins_of_the_tests(hook, package):
    revision = re.search(rf"{hook}\n\s+rev: v?([\d.]+)", text(".pre-commit-config.yaml"))[1]
    assert f"{package}=={revision}" in pins("requirements-dev.txt")


def test_readme_tree_names_what_is_on_disk():
    missing = [path for path in readme_tree() if not (ROOT / path).exists()]
    assert missing == []


def test_readme_tree_leaves_nothing_out():
    """All of the top, and all of each folder that the tree opens."""
    tree = {path.rstrip("/") for path in readme_tree()}
    opened = {str(Path(path).parent) for path in tree}
    for name in tracked_files():
        parts = Path(name).parts
        if parts[0].startswith(".") or parts[-1] == "__init__.py":
            continue
        for depth, part in enumerate(parts):
            folder = str(Path(*parts[:depth]))
            if folder in opened:
                assert str(Path(folder, part)) in tree, f"README's tree lacks {folder}/{part}"


def test_readme_names_only_targets_that_exist():
    targets = set(re.findall(r"^([a-z]+):", text("Makefile"), re.MULTILINE))
    named = set(
        re.findall(r"\bmake ([a-z]+)\b", "\n".join(re.findall(r"`[^`]+`", text("README.md"))))
    )
    assert {"lab", "test"} <= named <= targets


def test_ci_runs_the_two_commands_of_the_readme():
    assert re.findall(r"- run: (.*)", text(".github/workflows/ci.yml")) == [
        "make lab",
        "make test",
    ]
    assert text(".ci/run").splitlines()[-1] == "make test"


def test_no_large_file_is_committed_but_the_trained_weights():
    large = [name for name in tracked_files() if (ROOT / name).stat().st_size > 500 * 1024]
    assert large == ["data/model/model.safetensors"]
    assert "exclude: ^data/model/model\\.safetensors$" in text(".pre-commit-config.yaml")


def test_readme_shows_the_reference_run_as_it_is():
    """The block between the two comments is what ``labkit report --markdown`` prints for it."""
    block = text("README.md").split("a test compares them -->\n")[1]
    block = block.split("\n<!-- end of results -->")[0]
    caption, table = block.split("\n\n", 1)
    for records in load_references():
        if markdown_table(table_rows(records)).strip() == table.strip():
            machine = next(iter(records.values())).machine
            versions = machine["versions"]
            assert machine["name"] in caption
            assert f"torch {versions['torch']}" in caption
            return
    pytest.fail("README's table is of no run in data/reference")
