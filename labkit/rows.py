"""Rows of JSON lines, TSV and CSV files, each with its physical line and, if bad, the reason.

A reader turns numbered lines into numbered rows. A row is a dict of columns by name, or a
``Flaw`` that says why there is none. A file is read line by line, never as a whole.
"""

import csv
import json
from collections.abc import Iterator
from typing import BinaryIO

COLUMNS = ("sentence1", "sentence2", "label")
MAX_CHARACTERS = 100_000  # of a text; csv's own limit for a field is 131,072


class Flaw(str):
    """Why a row cannot be used, to be read after "line 7" or "sentence1"."""


NOT_UTF8 = Flaw("is not UTF-8 text (a GBK file: iconv -f GB18030 -t UTF-8 old > new)")
EMPTY_LINE = Flaw("is an empty line")

Lines = Iterator[tuple[int, str]]
Rows = Iterator[tuple[int, dict | Flaw]]


def read_lines(file: BinaryIO, digest) -> Lines:
    """Numbered lines without their ends and without a byte order mark.

    Bytes that are not UTF-8 survive as surrogates, so that their row can be named.

    Args:
        digest: A hashlib object; it is fed every byte of the file.
    """
    for number, raw in enumerate(file, 1):
        digest.update(raw)
        text = raw.decode("utf-8", "surrogateescape").rstrip("\r\n")
        yield number, text.removeprefix("\ufeff") if number == 1 else text


def _read_jsonl(lines: Lines) -> Rows:
    """One JSON object a line, as AFQMC is published (its files end in ``.json``)."""
    for number, line in lines:
        yield number, _parse_json(line)


def _parse_json(line: str) -> dict | Flaw:
    if not line.strip():
        return EMPTY_LINE
    try:
        row = json.loads(line.encode())
    except UnicodeEncodeError:
        return NOT_UTF8
    except (ValueError, RecursionError) as error:
        return Flaw(f"is not a line of JSON ({str(error).partition(':')[0]})")
    return row if isinstance(row, dict) else Flaw("is JSON, but not an object")


def _read_tsv(lines: Lines) -> Rows:
    """Tab-separated columns, with or without a header; a quote is a plain character."""
    columns = COLUMNS
    for number, line in lines:
        fields = line.split("\t")
        if number == 1 and "sentence1" in fields:
            columns = fields
        else:
            yield number, _by_name(columns, fields)


def _read_csv(lines: Lines) -> Rows:
    """Comma-separated columns below a header; quoted text may hold commas and line ends."""
    reader = csv.reader((f"{line}\n" for _, line in lines), strict=True)
    columns = None
    while True:
        number = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield number, Flaw(f"is not CSV, up to line {reader.line_num} ({error})")
            continue
        if columns is None:
            columns = fields
        else:
            yield number, _by_name(columns, fields)


def _by_name(columns: list[str] | tuple[str, ...], fields: list[str]) -> dict | Flaw:
    if not any(fields):
        return EMPTY_LINE
    if len(fields) > len(columns):
        return Flaw(f"has {len(fields)} columns, not {len(columns)}")
    return dict(zip(columns, fields, strict=False))


READERS = {".jsonl": _read_jsonl, ".json": _read_jsonl, ".tsv": _read_tsv, ".csv": _read_csv}


def find_flaw(row: dict | Flaw) -> Flaw | None:
    """Why a row cannot be trained on, or None if it can."""
    if isinstance(row, Flaw):
        return row
    for column in COLUMNS[:2]:
        if column not in row:
            return Flaw(f"has no {column}, only {str(list(row))[:80]}")
        if flaw := _text_flaw(row[column]):
            return Flaw(f"{column} {flaw}")
    label = row.get("label")
    if label is None or label == "":
        return Flaw("has no label, and training needs one (a test split often has none)")
    if isinstance(label, bool) or str(label).strip() not in ("0", "1"):
        return Flaw(f"the label is {str(label)[:40]!r}, not 0 or 1")
    return None


def _text_flaw(text: object) -> Flaw | None:
    if not isinstance(text, str):
        return Flaw(f"is {json.dumps(text)[:40]}, not text")
    try:
        text.encode()
    except UnicodeEncodeError:
        return NOT_UTF8
    if not text.strip():
        return Flaw("is empty")
    if len(text) > MAX_CHARACTERS:
        return Flaw(f"has {len(text):,} characters, more than {MAX_CHARACTERS:,}")
    return Flaw("holds a NUL byte") if "\0" in text else None
