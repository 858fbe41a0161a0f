import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from real_data import afqmc
from safetensors import safe_open

from labkit import token_cache
from labkit.data import Pairs, read_pairs
from labkit.token_cache import CacheError, cached_tokens
from labkit.tokenizer import encode, load_tokenizer, train_tokenizer

PAIRS = Pairs(["禾付", "云卡提额", "a"], ["b", "c", "d"], [1, 0, 1], "some/pairs.tsv", "", [])


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("qwen3-tiny")


@pytest.fixture
def make(tokenizer, tmp_path):
    """Calls cached_tokens with defaults; returns the tokens and the lines it logged."""

    def make(pairs=PAIRS, tokenizer=tokenizer, max_length=16, folder=tmp_path):
        lines = []
        return cached_tokens(pairs, tokenizer, max_length, folder, log=lines.append), lines

    return make


@pytest.fixture
def file(make, tmp_path):
    make()
    (file,) = tmp_path.iterdir()
    return file


def test_rows_are_those_of_the_tokenizer(make, tokenizer):
    tokens, lines = make()
    assert lines == []
    assert [row.tolist() for row in tokens.rows([2, 0])] == [
        encode(tokenizer, ["a"], ["d"])[0],
        encode(tokenizer, ["禾付"], ["b"])[0],
    ]
    assert (tokens.ids.dtype, tokens.offsets.dtype) == (torch.int32, torch.int64)
    assert tokens.labels.tolist() == [1, 0, 1]
    assert len(tokens) == 3


def test_rows_are_cut_at_max_length(make, tokenizer):
    tokens, _ = make(max_length=3)
    assert tokens.offsets.tolist() == [0, 3, 6, 9]


def test_many_chunks_make_the_same_tokens(make, monkeypatch, tmp_path):
    whole, _ = make()
    monkeypatch.setattr(token_cache, "CHUNK", 2)
    parts, _ = make(folder=tmp_path / "other")
    assert parts.ids.equal(whole.ids)
    assert parts.offsets.equal(whole.offsets)


def test_a_second_call_reads_the_file_and_tokenises_nothing(make, monkeypatch, file):
    before = file.stat().st_mtime_ns
    monkeypatch.setattr(token_cache, "encode", None)
    tokens, lines = make()
    assert (len(tokens), lines) == (3, [])
    assert file.stat().st_mtime_ns == before


def test_a_call_of_the_tokenizer_in_between_does_not_spoil_the_cache(make, monkeypatch, file):
    """It leaves truncation and padding behind in the live object (datasets #5985)."""
    tokenizer = load_tokenizer("qwen3-tiny")
    tokenizer(["a b c"], truncation=True, max_length=2, padding="max_length")
    monkeypatch.setattr(token_cache, "encode", None)
    assert make(tokenizer=tokenizer)[1] == []


def changed_tokenizer():
    return train_tokenizer(["another corpus"])


def changed_side():
    tokenizer = load_tokenizer("qwen3-tiny")
    tokenizer.truncation_side = "left"
    return tokenizer


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda: {"max_length": 15}, "it was made with another max_length"),
        (lambda: {"tokenizer": changed_tokenizer()}, "it was made with another tokenizer"),
        (lambda: {"tokenizer": changed_side()}, "it was made with another tokenizer"),
        (
            lambda: {"pairs": replace(PAIRS, second=["b", "c", "e"])},
            "it was made with another data set",
        ),
        (
            lambda: {"pairs": replace(PAIRS, labels=[1, 0, 0])},
            "it was made with another data set",
        ),
    ],
)
def test_a_stale_cache_is_made_again_and_says_why(make, file, change, reason):
    changes = change()
    tokens, lines = make(**changes)
    assert lines == [f"token cache some-pairs.tsv.safetensors is made again: {reason}."]
    assert tokens.labels.tolist() == changes.get("pairs", PAIRS).labels
    assert make(**changes)[1] == []


def test_another_version_of_the_code_makes_the_cache_again(make, file, monkeypatch):
    monkeypatch.setattr(token_cache, "CODE_VERSION", "0")
    assert make()[1] == [
        f"token cache {file.name} is made again: it was made with another version of the cache."
    ]


def test_a_damaged_cache_is_made_again_wherever_a_bit_is_flipped(make, file):
    good = file.read_bytes()
    expected, _ = make()
    for position in range(0, len(good), 13):
        file.write_bytes(good[:position] + bytes([good[position] ^ 4]) + good[position + 1 :])
        tokens, lines = make()
        assert len(lines) == 1
        assert tokens.ids.equal(expected.ids)
        assert tokens.labels.equal(expected.labels)


@pytest.mark.parametrize("content", [b"", b"{}", b"\x80\x04K\x01."])
def test_a_file_that_is_no_cache_is_replaced(make, file, content):
    file.write_bytes(content)
    tokens, lines = make()
    assert len(tokens) == 3
    assert len(lines) == 1
    assert "it is damaged" in lines[0]


def test_a_cache_cut_in_half_is_made_again(make, file):
    good = file.read_bytes()
    file.write_bytes(good[: len(good) // 2])
    tokens, lines = make()
    assert len(tokens) == 3
    assert len(lines) == 1
    assert "it is damaged" in lines[0]
    assert make()[1] == []


def test_a_killed_writer_leaves_the_old_file(make, file, monkeypatch):
    good = file.read_bytes()

    def half(tensors, target, metadata):
        Path(target).write_bytes(good[:20])
        raise KeyboardInterrupt

    monkeypatch.setattr(token_cache, "save_file", half)
    with pytest.raises(KeyboardInterrupt):
        make(max_length=5)
    assert file.read_bytes() == good
    assert list(file.parent.iterdir()) == [file]


def test_a_folder_that_cannot_be_written_to_is_an_error(make, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CacheError, match=r"cannot be written .*; give yourself the right"):
        make(folder=tmp_path / "file" / "cache")


def test_a_full_disk_is_an_error(make, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_cache, "save_file", full)
    with pytest.raises(CacheError, match="No space left on device"):
        make()


def test_what_the_file_was_made_from_is_written_inside(file):
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    assert metadata["max_length"] == "16"
    for name in ("data set", "tokenizer", "content"):
        assert len(metadata[name]) == 64


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc/self/maps")
def test_tokens_are_mapped_from_the_file_not_copied(make, file):
    tokens, _ = make()
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [
        [int(address, 16) for address in columns[0].split("-")]
        for columns in maps
        if columns[-1] == str(file)
    ]
    assert any(start <= tokens.ids.data_ptr() < end for start, end in ranges)


@pytest.mark.real_data
def test_the_real_corpus_is_cached_whole(make):
    tokens, lines = make(pairs=read_pairs(afqmc("dev.tsv")), max_length=64)
    assert len(tokens) == 4316
    assert lines == []
    assert tokens.offsets.diff().max() == 64
