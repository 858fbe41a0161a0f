import hashlib
import json

import pytest
from real_data import afqmc
from typer.testing import CliRunner

from labkit.cli_data import app
from labkit.data import DATA_FOLDER


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def file(tmp_path):
    """Three good rows, two of them the same, and one bad row."""
    file = tmp_path / "pairs.tsv"
    file.write_text("ab\tc\t1\nab\tc\t1\nabcde\tfghij\t0\nd\te\t2\n")
    return file


def test_check_counts_and_names_bad_rows(file):
    result = run("check", file)
    assert result.exit_code == 1
    assert [line.split(maxsplit=1) for line in result.stdout.splitlines()][2:4] == [
        ["pairs", "3"],
        ["labels", "1 of label 0 (33.3%), 2 of label 1 (66.7%)"],
    ]
    assert "a pair: mean 5.333, median 3, p90 8.6, p99 9.86, max 10" in result.stdout
    assert "duplicates  1\nbad rows    1\n" in result.stdout
    assert "  line 4: the label is '2', not 0 or 1\n" in result.stdout


def test_check_in_json(file):
    document = json.loads(run("check", file, "--json").stdout)
    assert document["name"] == "pairs.tsv"
    assert document["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (document["pairs"], document["skipped_rows"], document["duplicates"]) == (3, 1, 1)
    assert document["labels"] == {"0": 1, "1": 2}
    assert document["characters"]["median"] == 3
    assert document["tokens"]["max"] >= 4
    assert document["bad_rows"] == [{"line": 4, "reason": "the label is '2', not 0 or 1"}]


def test_check_goes_on_if_told_to_skip(file):
    result = run("check", file, "--skip-bad")
    assert result.exit_code == 0
    assert "line 4" in result.stdout


def test_check_shows_the_first_twenty_bad_rows(tmp_path):
    file = tmp_path / "pairs.tsv"
    file.write_text("a\tb\t1\n" + "c\td\t2\n" * 25)
    result = run("check", file)
    assert result.stdout.count("  line ") == 20
    assert result.stdout.endswith("  and 5 more\n")


def test_check_of_the_lab_s_own_pairs_is_clean():
    result = run("check", "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert (document["pairs"], document["duplicates"], document["bad_rows"]) == (3200, 0, [])


@pytest.mark.parametrize("skip", [(), ("--skip-bad",)])
def test_check_says_that_labels_are_missing(tmp_path, skip):
    file = tmp_path / "test.tsv"
    file.write_text("a\tb\nc\td\n")
    result = run("check", file, *skip)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"labkit: {file}: none of its 2 rows can be used")
    assert "has no label, and training needs one" in result.stderr
    assert result.stderr.count("\n") == 1


def test_make_writes_what_is_shipped(tmp_path):
    result = run("make", "--out", tmp_path / "new" / "pairs")
    assert result.exit_code == 0
    for line in result.stdout.splitlines():
        sha256, file = line.split("  ")
        name = file.rpartition("/")[2]
        shipped = (DATA_FOLDER / "pairs" / name).read_bytes()
        assert hashlib.sha256(shipped).hexdigest() == sha256
        assert (tmp_path / "new" / "pairs" / name).read_bytes() == shipped
    assert len(result.stdout.splitlines()) == 4


def test_make_replaces_other_content_only_by_force(tmp_path):
    (tmp_path / "dev.jsonl").write_text("precious")
    result = run("make", "--pairs", 16, "--out", tmp_path)
    assert result.exit_code == 1
    assert result.stderr == (
        f"labkit: {tmp_path / 'dev.jsonl'} has other content; --force replaces it.\n"
    )
    assert [file.name for file in tmp_path.iterdir()] == ["dev.jsonl"]
    document = json.loads(
        run("make", "--pairs", 16, "--out", tmp_path, "--force", "--json").stdout
    )
    assert len(document["files"]) == 4
    assert (tmp_path / "dev.jsonl").read_text().count("\n") == 2
    assert run("make", "--pairs", 16, "--out", tmp_path).exit_code == 0


def test_make_in_a_folder_that_cannot_be_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    result = run("make", "--pairs", 16, "--out", tmp_path / "file" / "pairs")
    assert result.exit_code == 1
    assert "cannot be written to" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [(), ("make",), ("check",)])
def test_help_ends_with_examples(command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "$ labkit data " in result.stdout.partition("Examples")[2]


@pytest.mark.real_data
def test_check_of_the_real_corpus():
    result = run("check", afqmc("train.tsv"))
    assert result.exit_code == 0
    assert "pairs       34,334\n" in result.stdout
    result = run("check", afqmc("test.tsv"))
    assert result.exit_code == 1
    assert "none of its 3,861 rows" in result.stderr
    assert "has no label" in result.stderr
