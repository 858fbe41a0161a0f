import hashlib
import json
import subprocess
import sys

import pytest
from real_data import afqmc

from labkit import data
from labkit.data import BadRow, DataError, read_pairs

GOOD_JSON = '{"sentence1": "a", "sentence2": "b", "label": "1"}'
FILES = {
    "pairs.jsonl": '{"sentence1": "花呗", "sentence2": "借呗", "label": "1"}\n'
    '{"id": 7, "label": 0, "sentence1": "c,\\"d\\"", "sentence2": "e"}\n',
    "published.json": '{"sentence1": "花呗", "sentence2": "借呗", "label": "1", "id": 0}\r\n'
    '{"sentence1": "c,\\"d\\"", "sentence2": "e", "label": "0"}',
    "plain.tsv": '花呗\t借呗\t1\nc,"d"\te\t0\n',
    "header.tsv": 'label\tsentence1\tsentence2\n1\t花呗\t借呗\n0\tc,"d"\te\n',
    "UPPER.CSV": 'sentence1,sentence2,label\r\n花呗,借呗,1\r\n"c,""d""",e,0\r\n',
}


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    return write


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_the_same_pairs(write, name, mark):
    file = write(name, mark + FILES[name])
    pairs = read_pairs(file)
    assert (pairs.first, pairs.second, pairs.labels) == (
        ["花呗", 'c,"d"'],
        ["借呗", "e"],
        [1, 0],
    )
    assert pairs.facts() == {
        "name": name,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "pairs": 2,
        "skipped_rows": 0,
    }


def test_quotes_in_a_tsv_are_plain_characters(write):
    pairs = read_pairs(write("quotes.tsv", '"a\tb"c\t1\nd\te"\t0\n'))
    assert pairs.first == ['"a', "d"]
    assert pairs.second == ['b"c', 'e"']


def test_csv_text_may_hold_line_ends_and_lines_are_counted_physically(write):
    file = write("lines.csv", 'sentence1,sentence2,label\n"a\nb",c,1\nd,e,2\nf,g,0\n')
    pairs = read_pairs(file, skip_bad=True)
    assert pairs.first == ["a\nb", "f"]
    assert pairs.bad_rows == [BadRow(4, "the label is '2', not 0 or 1")]


BAD_JSON = {
    '{"sentence1": "a", "sente': "is not a line of JSON (Unterminated string starting at)",
    "": "is an empty line",
    "[1]": "is JSON, but not an object",
    '"text"': "is JSON, but not an object",
    "[" * 100_000: "is not a line of JSON",
    '{"text": "a"}': "has no sentence1, only ['text']",
    '{"sentence1": "a", "label": 1}': "has no sentence2",
    '{"sentence1": null, "sentence2": "b", "label": 1}': "sentence1 is null, not text",
    '{"sentence1": NaN, "sentence2": "b", "label": 1}': "sentence1 is NaN, not text",
    '{"sentence1": 5, "sentence2": "b", "label": 1}': "sentence1 is 5, not text",
    '{"sentence1": "a", "sentence2": "", "label": 1}': "sentence2 is empty",
    '{"sentence1": "a", "sentence2": "\u3000 ", "label": 1}': "sentence2 is empty",
    '{"sentence1": "a\\u0000", "sentence2": "b", "label": 1}': "sentence1 holds a NUL byte",
    '{"sentence1": "\\ud83d", "sentence2": "b", "label": 1}': "sentence1 is not UTF-8 text",
    '{"sentence1": "a", "sentence2": "b"}': "has no label, and training needs one",
    '{"sentence1": "a", "sentence2": "b", "label": null}': "has no label",
    '{"sentence1": "a", "sentence2": "b", "label": "2"}': "the label is '2', not 0 or 1",
    '{"sentence1": "a", "sentence2": "b", "label": true}': "the label is 'True', not 0 or 1",
    '{"sentence1": "a", "sentence2": "b", "label": 1.5}': "the label is '1.5', not 0 or 1",
    '{"sentence1": "a", "sentence2": "b", "label": NaN}': "the label is 'nan', not 0 or 1",
    '{"sentence1": "%s", "sentence2": "b", "label": 1}' % ("x" * 400_000): (
        "sentence1 has 400,000 characters, more than 100,000"
    ),
}


@pytest.mark.parametrize("row", BAD_JSON, ids=BAD_JSON.values())
def test_a_bad_json_row_is_named_or_skipped(write, row):
    file = write("pairs.jsonl", f"{GOOD_JSON}\n{row}\n{GOOD_JSON}\n")
    with pytest.raises(DataError) as caught:
        read_pairs(file)
    assert str(caught.value).startswith(f"{file}:2: {BAD_JSON[row]}")
    assert str(caught.value).endswith("go on without bad rows: --skip-bad (skip_bad=True).")
    pairs = read_pairs(file, skip_bad=True)
    assert len(pairs) == 2
    assert pairs.facts()["skipped_rows"] == 1
    assert pairs.bad_rows[0].line == 2
    assert pairs.bad_rows[0].reason.startswith(BAD_JSON[row])


BAD_TSV = {
    "a\tb": "has no label",
    "a\tb\t": "has no label",
    "a": "has no sentence2",
    "a\tb\t1\tc": "has 4 columns, not 3",
    "\tb\t1": "sentence1 is empty",
    "\t\t": "is an empty line",
    "a\x00\tb\t1": "sentence1 holds a NUL byte",
    "a\tb\tnan": "the label is 'nan', not 0 or 1",
    "x" * 400_000 + "\tb\t1": "sentence1 has 400,000 characters",
}


@pytest.mark.parametrize("row", BAD_TSV, ids=BAD_TSV.values())
def test_a_bad_tsv_row_is_skipped_with_its_reason(write, row):
    pairs = read_pairs(write("pairs.tsv", f"{row}\nc\td\t0\n"), skip_bad=True)
    assert pairs.first == ["c"]
    assert pairs.bad_rows[0].line == 1
    assert pairs.bad_rows[0].reason.startswith(BAD_TSV[row])


BAD_CSV = {
    "a,b": "has no label",
    "": "is an empty line",
    "a,b,1,c": "has 4 columns, not 3",
    'a,"b"c,1': "is not CSV, up to line 2",
    "a\rb,c,1": "is not CSV, up to line 2",
    "x" * 400_000 + ",b,1": "is not CSV, up to line 2 (field larger than field limit",
    "x" * 110_000 + ",b,1": "sentence1 has 110,000 characters",
}


@pytest.mark.parametrize("row", BAD_CSV, ids=BAD_CSV.values())
def test_a_bad_csv_row_is_skipped_with_its_reason(write, row):
    file = write("pairs.csv", f"sentence1,sentence2,label\n{row}\nc,d,0\n")
    pairs = read_pairs(file, skip_bad=True)
    assert pairs.first == ["c"]
    assert pairs.bad_rows[0].line == 2
    assert pairs.bad_rows[0].reason.startswith(BAD_CSV[row])


def test_the_rows_that_an_open_quote_swallows_are_named(write):
    file = write("open.csv", 'sentence1,sentence2,label\na,b,1\n"c,d,0\ne,f,1\n')
    pairs = read_pairs(file, skip_bad=True)
    assert pairs.first == ["a"]
    assert pairs.bad_rows == [BadRow(3, "is not CSV, up to line 4 (unexpected end of data)")]


@pytest.mark.parametrize("name", FILES)
def test_a_gbk_file_is_said_not_to_be_utf_8(write, name):
    content = FILES[name].encode("gb18030")
    first = 2 if content.split(b"\n")[0].isascii() else 1
    with pytest.raises(DataError, match=rf":{first}: .*is not UTF-8 text .*iconv -f GB18030"):
        read_pairs(write(name, content))


def test_one_line_of_other_bytes_is_one_bad_row(write):
    pairs = read_pairs(write("mixed.tsv", b"a\tb\t1\n\xff\tb\t1\n"), skip_bad=True)
    assert pairs.first == ["a"]
    assert pairs.bad_rows[0].line == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", "", "holds no pairs"),
        ("empty.csv", "", "holds no pairs"),
        ("header.csv", "sentence1,sentence2,label\n", "holds no pairs"),
        ("header.tsv", "sentence1\tsentence2\tlabel\n", "holds no pairs"),
        (
            "test.csv",
            "sentence1,sentence2\na,b\n",
            "none of its 1 rows .* line 2: has no label",
        ),
        ("test.tsv", "a\tb\nc\td\n", "none of its 2 rows can be used; .* 1: has no label"),
        ("headless.csv", "a,b,1\nc,d,0\n", r"has no sentence1, only \['a', 'b', '1'\]"),
        ("utf16.tsv", "a\tb\t1\n".encode("utf-16"), "is not UTF-8 text"),
        ("pairs.xlsx", "PK", "must end in one of .jsonl, .json, .tsv, .csv"),
        ("pairs", GOOD_JSON, "must end in one of"),
    ],
)
def test_a_file_without_usable_rows_is_an_error_even_if_bad_rows_are_skipped(
    write, name, content, message
):
    file = write(name, content)
    with pytest.raises(DataError, match=message):
        read_pairs(file, skip_bad=True)


def test_a_folder_and_a_missing_file_are_errors(tmp_path):
    with pytest.raises(DataError, match="is a folder; name one of the files in it"):
        read_pairs(tmp_path)
    with pytest.raises(DataError, match=r"nope\.tsv: there is no such file\."):
        read_pairs(tmp_path / "nope.tsv")


def test_an_unreadable_file_is_an_error(write, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    file = write("pairs.jsonl", GOOD_JSON)
    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(DataError, match=r"pairs\.jsonl cannot be read: Permission denied"):
        read_pairs(file)


def test_missing_synthetic_pairs_say_how_to_make_them(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "TRAINING_FILE", tmp_path / "train.jsonl")
    with pytest.raises(DataError, match="`labkit data make` writes it"):
        read_pairs()


def test_the_hub_is_asked_for_the_file_in_the_data_set(write, monkeypatch):
    asked = []

    def download(*args, **options):
        asked.append((args, options))
        return str(write("train.jsonl", GOOD_JSON))

    monkeypatch.setattr(data, "hub_reachable", lambda: True)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert (
        read_pairs("hub:owner/name/some/train.jsonl").name == "hub:owner/name/some/train.jsonl"
    )
    assert asked == [
        (
            ("owner/name", "some/train.jsonl"),
            {"repo_type": "dataset", "local_files_only": False},
        )
    ]


@pytest.mark.parametrize(
    ("reachable", "message"),
    [
        (False, "the hub could not be reached, .* a local copy works"),
        (True, "the hub has no such file, or does not show it to you; .* a local copy works"),
    ],
)
def test_a_hub_file_that_cannot_be_had_is_one_sentence(monkeypatch, reachable, message):
    def download(*_, **options):
        raise FileNotFoundError("…\n…")

    monkeypatch.setattr(data, "hub_reachable", lambda: reachable)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(DataError, match=message) as caught:
        read_pairs("hub:owner/name/train.jsonl")
    assert "\n" not in str(caught.value)


def test_an_incomplete_hub_address_is_an_error():
    with pytest.raises(DataError, match="write hub:owner/name/path/in"):
        read_pairs("hub:owner/train.jsonl")


def test_reading_needs_neither_torch_nor_transformers():
    code = (
        "import sys; from labkit.data import read_pairs; read_pairs();"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert answer.stdout.strip() == b"set()"


def test_a_file_is_read_line_by_line(write):
    file = write("pairs.jsonl", f"{GOOD_JSON}\n" * 1000)
    with file.open("rb") as stream:
        rows = data.READERS[".jsonl"](data.read_lines(stream, hashlib.sha256()))
        assert next(rows) == (1, json.loads(GOOD_JSON))
        assert stream.tell() == len(GOOD_JSON) + 1


@pytest.mark.real_data
def test_real_splits():
    train, dev = read_pairs(afqmc("train.tsv")), read_pairs(afqmc("dev.tsv"))
    assert (len(train), len(dev)) == (34334, 4316)
    assert train.labels.count(1) == 10573
    with pytest.raises(DataError, match=r"test\.tsv:1: has no label"):
        read_pairs(afqmc("test.tsv"))
    with pytest.raises(DataError, match="none of its 3,861 rows can be used"):
        read_pairs(afqmc("test.tsv"), skip_bad=True)
