import json
import logging
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from real_data import afqmc
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from labkit import tokenizer as tokenizer_module
from labkit.data import DATA_FOLDER, DataError, Pairs, read_pairs
from labkit.recipe import EMBEDDING_MODELS, Recipe
from labkit.tokenizer import BUILT_IN_FOLDER, END, PAD, encode, train_tokenizer
from labkit.tokens import Batch, TokenizerError, batches, collate, load_tokenizer

RECIPE = Recipe(model="qwen3-tiny", batch_size=4, max_length=24)
PAIRS = Pairs(
    first=["提额" * i + "禾付" for i in range(10)],
    second=[f"云卡{i}" for i in range(10)],
    labels=[i % 2 for i in range(10)],
    name="ten",
    sha256="",
    bad_rows=[],
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("qwen3-tiny")


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "hub_reachable", lambda: False)


def word_tokenizer(folder, **special):
    """A saved tokenizer that knows two words and has the special tokens that are given."""
    vocabulary = {"a": 0, "b": 1, "[END]": 2, "[PAD]": 3}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="b"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    return str(folder)


# Loading


def test_built_in_geometries_share_the_shipped_tokenizer(tokenizer):
    assert len(tokenizer) == len(load_tokenizer("qwen3-small")) <= 8192
    assert (tokenizer.pad_token, tokenizer.eos_token) == (PAD, END)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_the_shipped_tokenizer_is_what_the_code_trains(tmp_path):
    pairs = read_pairs()
    train_tokenizer(pairs.first + pairs.second).save_pretrained(tmp_path)
    for file in BUILT_IN_FOLDER.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()
        assert file.stat().st_size < 500_000


@pytest.mark.parametrize(
    "text", ["禾付怎么提额", "龘靐 😀👩‍🚀", "Ünï¢ode\t\n x", "\u0000\u200b", "a" * 3000]
)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = encode(tokenizer, [text], ["b"])[0]
    assert max(ids) < 8192
    assert tokenizer.decode(ids) == f"{text}{END}b{END}"


def test_common_characters_are_single_tokens(tokenizer):
    assert all(len(tokenizer.tokenize(character)) == 1 for character in "蚂蚁啊座")


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_pairs_are_as_long_as_those_of_afqmc(tokenizer, split):
    pairs = read_pairs(DATA_FOLDER / "pairs" / f"{split}.jsonl")
    lengths = [len(ids) for ids in encode(tokenizer, pairs.first, pairs.second)]
    assert np.mean(lengths) == pytest.approx(18.5, rel=0.03)
    assert np.percentile(lengths, [50, 90, 99]) == pytest.approx([17, 26, 43], rel=0.06)
    assert max(lengths) == pytest.approx(101, rel=0.08)


def test_a_folder_with_a_tokenizer_is_used_and_the_end_token_pads_if_need_be(tmp_path):
    tokenizer = load_tokenizer(word_tokenizer(tmp_path, eos_token="[END]"))
    assert (len(tokenizer), tokenizer.pad_token_id) == (4, 2)
    tokenizer = load_tokenizer(word_tokenizer(tmp_path, eos_token="[END]", pad_token="[PAD]"))
    assert tokenizer.pad_token_id == 3


def test_the_tokenizer_beside_a_config_file_is_used(tmp_path):
    word_tokenizer(tmp_path, eos_token="[END]")
    (tmp_path / "config.json").write_text('{"vocab_size": 4}')
    assert len(load_tokenizer(str(tmp_path / "config.json"))) == 4


def test_nothing_to_pad_with_is_an_error(tmp_path):
    model = word_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="neither a pad nor an end token"):
        load_tokenizer(model)


def test_a_broken_tokenizer_is_one_sentence(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with pytest.raises(TokenizerError, match="does not load: ") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_slow_tokenizer_is_refused(tmp_path, monkeypatch):
    model = word_tokenizer(tmp_path, eos_token="[END]")
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        load_tokenizer(model)


@pytest.mark.parametrize(
    "config", [{"vocab_size": 5000}, {"text_config": {"vocab_size": 5000}}]
)
@pytest.mark.parametrize("path", ["", "config.json"])
def test_a_config_without_tokenizer_gets_the_built_in_one(tmp_path, caplog, config, path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_tokenizer(str(tmp_path / path)).pad_token == PAD
    assert len(caplog.messages) == 1
    assert "no tokenizer files there, so the built-in tokenizer is used" in caplog.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"vocab_size": 100}', "its vocabulary of 100 is too small for the built-in"),
        ('{"hidden_size": 8}', r"no config with a vocab_size \(KeyError\)"),
        ("[]", "no config with a vocab_size"),
        ("{", "no config with a vocab_size"),
    ],
)
def test_a_config_that_no_tokenizer_fits_is_an_error(tmp_path, config, message):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(str(tmp_path))


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(TokenizerError, match="no config with a vocab_size"):
        load_tokenizer(str(tmp_path))


def test_qwen3_embedding_offline_gets_the_built_in_tokenizer(offline, monkeypatch, caplog):
    def fail(*_, **options):
        assert options == {"local_files_only": True, "trust_remote_code": False}
        raise OSError("not in the cache")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fail)
    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(EMBEDDING_MODELS[0]).pad_token == PAD
    assert caplog.messages == [
        "Qwen/Qwen3-Embedding-0.6B: its tokenizer cannot be reached, so the built-in "
        "tokenizer is used."
    ]


def test_another_hub_id_offline_is_one_sentence(offline):
    with pytest.raises(TokenizerError, match="owner/name does not load: the hub cannot be"):
        load_tokenizer("owner/name")


# Encoding


def test_a_pair_has_an_end_token_after_each_text(tokenizer):
    ids = encode(tokenizer, ["a"], ["b"])[0]
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", END, "b", END]


def test_the_longer_text_is_cut_and_the_end_tokens_stay(tokenizer):
    ids = encode(tokenizer, ["abcdefg"], ["8"], max_length=6)[0]
    assert tokenizer.decode(ids) == f"abc{END}8{END}"


def test_encoding_without_a_limit_forgets_an_earlier_one(tokenizer):
    assert len(encode(tokenizer, ["abcdefg"], ["8"], max_length=4)[0]) == 4
    assert len(encode(tokenizer, ["abcdefg"], ["8"])[0]) == 10


def test_a_max_length_without_room_for_a_word_is_an_error(tokenizer):
    assert len(encode(tokenizer, ["a"], ["b"], max_length=3)[0]) == 3
    with pytest.raises(TokenizerError, match="max_length 2 is too short: each pair has 2"):
        encode(tokenizer, ["a"], ["b"], max_length=2)


def test_a_pair_without_any_token_is_an_error(tmp_path):
    tokenizer = load_tokenizer(word_tokenizer(tmp_path, eos_token="[END]"))
    with pytest.raises(TokenizerError, match="no token of the pair that begins ' '"):
        encode(tokenizer, ["a", " "], ["b", " "])


# Batches


def test_collate_pads_on_the_side_asked_for():
    rows = [[5, 6, 7], torch.tensor([8], dtype=torch.int32)]
    right = collate(rows, [1, 0], pad_id=9, length=None)
    assert right.input_ids.tolist() == [[5, 6, 7], [8, 9, 9]]
    assert right.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert (right.labels.tolist(), right.real_tokens) == ([1, 0], 4)
    left = collate(rows, torch.tensor([1, 0]), pad_id=9, length=4, side="left")
    assert left.input_ids.tolist() == [[9, 5, 6, 7], [9, 9, 9, 8]]
    assert left.attention_mask.tolist() == [[0, 1, 1, 1], [0, 0, 0, 1]]
    assert {t.dtype for t in (left.input_ids, left.attention_mask, left.labels)} == {
        torch.int64
    }


def test_collate_never_cuts_a_row():
    with pytest.raises(ValueError, match="a row of 3 tokens does not fit into 2"):
        collate([[1, 2, 3]], [0], pad_id=0, length=2)
    with pytest.raises(ValueError, match="side must be right or left, not 'top'"):
        collate([[1]], [0], pad_id=0, length=None, side="top")


@pytest.mark.parametrize(
    ("pairs", "parts", "sizes"),
    [(32, 5, [7, 7, 6, 6, 6]), (8, 4, [2, 2, 2, 2]), (3, 4, [1, 1, 1]), (5, 1, [5])],
)
def test_split_gives_even_parts_and_loses_nothing(pairs, parts, sizes):
    batch = collate([[i] * (i + 1) for i in range(pairs)], range(pairs), pad_id=0, length=None)
    split = batch.split(parts)
    assert [len(part.labels) for part in split] == sizes
    for name in ("input_ids", "attention_mask", "labels"):
        parts_of_it = [getattr(part, name) for part in split]
        assert torch.cat(parts_of_it).equal(getattr(batch, name))
        assert parts_of_it[0].data_ptr() == getattr(batch, name).data_ptr()


def test_split_asks_for_no_value_of_a_tensor():
    """A prediction splits fake tensors, which have none; on a GPU asking would wait."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        ids = torch.empty(4, 6, dtype=torch.int64)
        parts = Batch(ids, ids, torch.empty(4, dtype=torch.int64), 24).split(2)
    assert [part.input_ids.shape for part in parts] == [(2, 6), (2, 6)]
    assert [part.real_tokens for part in parts] == [None, None]


def test_to_moves_every_tensor():
    moved = collate([[1]], [0], pad_id=0, length=None).to("meta")
    assert {t.device.type for t in (moved.input_ids, moved.attention_mask, moved.labels)} == {
        "meta"
    }
    assert moved.real_tokens == 1


def epochs(recipe, tokenizer, count, folder, pairs=PAIRS):
    """The batches of some epochs."""
    stream = batches(recipe, pairs, tokenizer, cache_folder=folder)
    return list(islice(stream, count * -(-len(pairs) // recipe.batch_size)))


def test_an_epoch_holds_every_pair_once_and_keeps_the_rest(tokenizer, tmp_path):
    two_epochs = epochs(RECIPE, tokenizer, 2, tmp_path)
    assert [len(batch.labels) for batch in two_epochs] == [4, 4, 2, 4, 4, 2]
    texts = [
        tokenizer.decode(ids).replace(PAD, "")
        for batch in two_epochs
        for ids in batch.input_ids
    ]
    assert len(set(texts[:10])) == 10
    assert set(texts[:10]) == set(texts[10:])
    assert texts[:10] != texts[10:]


def test_labels_stay_with_their_pairs(tokenizer, tmp_path):
    for batch in epochs(RECIPE, tokenizer, 1, tmp_path):
        for ids, label in zip(batch.input_ids, batch.labels, strict=True):
            number = tokenizer.decode(ids).partition("云卡")[2][0]
            assert int(number) % 2 == label


@pytest.mark.parametrize("padding", ["longest", "max"])
def test_cached_and_uncached_batches_are_identical(tokenizer, tmp_path, padding):
    recipe = replace(RECIPE, padding=padding)
    plain = epochs(recipe, tokenizer, 2, tmp_path)
    cached = epochs(replace(recipe, cached=True), tokenizer, 2, tmp_path)
    assert list(tmp_path.glob("*.safetensors"))
    for one, other in zip(plain, cached, strict=True):
        assert one.input_ids.equal(other.input_ids)
        assert one.attention_mask.equal(other.attention_mask)
        assert one.labels.equal(other.labels)
        assert one.real_tokens == other.real_tokens == one.attention_mask.sum()


def test_padding_decides_the_length(tokenizer, tmp_path):
    for batch in epochs(RECIPE, tokenizer, 1, tmp_path):
        assert batch.input_ids.shape[1] == batch.attention_mask.sum(1).max()
    for batch in epochs(replace(RECIPE, padding="max"), tokenizer, 1, tmp_path):
        assert batch.input_ids.shape[1] == 24


def test_the_seed_alone_decides_the_order(tokenizer, tmp_path):
    def order(recipe):
        return torch.cat([b.labels for b in epochs(recipe, tokenizer, 3, tmp_path)]).tolist()

    assert order(RECIPE) == order(replace(RECIPE, batch_size=3, padding="max", cached=True))
    assert order(RECIPE) != order(replace(RECIPE, seed=7))


def test_padding_goes_right_whatever_the_tokenizer_prefers(tmp_path):
    tokenizer = load_tokenizer("qwen3-tiny")
    tokenizer.padding_side = "left"
    (batch, *_) = epochs(RECIPE, tokenizer, 1, tmp_path)
    assert batch.attention_mask[:, 0].all()


def test_no_pairs_are_an_error_at_once(tokenizer):
    nothing = Pairs([], [], [], "empty.tsv", "", [])
    with pytest.raises(DataError, match=r"empty\.tsv holds no pairs"):
        batches(RECIPE, nothing, tokenizer)


@pytest.mark.real_data
def test_real_pairs_fit_the_built_in_tokenizer(tokenizer):
    pairs = read_pairs(afqmc("dev.tsv"))
    rows = encode(tokenizer, pairs.first, pairs.second)
    assert max(max(row) for row in rows) < 8192
    assert np.percentile([len(row) for row in rows], 99) < 64
