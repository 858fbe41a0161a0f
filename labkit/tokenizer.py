"""Tokenizers: the small one that comes with the lab, and those of other models."""

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or it warns when a process forks

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from labkit.data import DATA_FOLDER
from labkit.hub import hub_reachable
from labkit.recipe import EMBEDDING_MODELS, GEOMETRIES

BUILT_IN_FOLDER = DATA_FOLDER / "tokenizer"
PAD, END = "<|pad|>", "<|endoftext|>"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt",
)  # fmt: skip

logger = logging.getLogger(__name__)


class TokenizerError(ValueError):
    """A tokenizer that cannot be had or not be used; the message says why."""


def load_tokenizer(model: str) -> PreTrainedTokenizerFast:
    """The tokenizer of ``Recipe.model``, always with a pad token (its end token if need be).

    Built-in geometries use the lab's own. So does a model without tokenizer files, or a
    Qwen3-Embedding that is out of reach, and one logged line says so: the ids of the small
    vocabulary are rows of the large one, so the model computes as much as with its own.

    Raises:
        TokenizerError: The hub cannot be reached, files are broken, the vocabulary of a model
            without tokenizer files is too small, or there is neither a pad nor an end token.
    """
    path = Path(model).expanduser()
    if model in GEOMETRIES:
        return PreTrainedTokenizerFast.from_pretrained(BUILT_IN_FOLDER)
    if path.exists():
        folder = path if path.is_dir() else path.parent
        if any((folder / name).is_file() for name in TOKENIZER_FILES):
            return _load(str(folder), local=True)
        return _stand_in(model, "no tokenizer files there", _vocabulary(path))
    try:
        return _load(model, local=not hub_reachable())
    except TokenizerError as error:
        if model in EMBEDDING_MODELS and isinstance(error.__cause__, OSError):
            return _stand_in(model, "its tokenizer cannot be reached")
        raise


def _load(source: str, *, local: bool) -> PreTrainedTokenizerFast:
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, local_files_only=local, trust_remote_code=False
        )
    except Exception as error:  # a broken file raises anything, from KeyError to Rust's own
        if local and not Path(source).exists():
            reason = (
                "the hub cannot be reached, and it is in neither the local cache nor a folder"
            )
        else:
            reason = str(error).partition("\n")[0] or type(error).__name__
        raise TokenizerError(f"the tokenizer of {source} does not load: {reason}.") from error
    if not tokenizer.is_fast:
        raise TokenizerError(f"the tokenizer of {source} has no tokenizer.json (a fast one).")
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise TokenizerError(
                f"the tokenizer of {source} has neither a pad nor an end token to pad with; "
                "set pad_token in its tokenizer_config.json."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _vocabulary(path: Path) -> int:
    """``vocab_size`` of a config file, or of the one in a folder."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return int(config.get("text_config", config)["vocab_size"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise TokenizerError(
            f"{file}: no config with a vocab_size ({type(error).__name__})."
        ) from error


def _stand_in(
    model: str, reason: str, vocabulary: int | None = None
) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUILT_IN_FOLDER)
    if vocabulary is not None and vocabulary < len(tokenizer):
        raise TokenizerError(
            f"{model}: {reason}, and its vocabulary of {vocabulary} is too small for the "
            f"built-in tokenizer ({len(tokenizer)} tokens)."
        )
    logger.warning("%s: %s, so the built-in tokenizer is used.", model, reason)
    return tokenizer


def encode(
    tokenizer: PreTrainedTokenizerFast,
    first: list[str],
    second: list[str],
    max_length: int | None = None,
) -> list[list[int]]:
    """Token ids of each pair; of one longer than ``max_length`` the longer text is cut.

    Raises:
        TokenizerError: ``max_length`` has no room for the special tokens of a pair, or a pair
            has no token at all.
    """
    special = tokenizer.num_special_tokens_to_add(pair=True)
    if max_length is not None and max_length <= special:
        raise TokenizerError(
            f"max_length {max_length} is too short: each pair has {special} special tokens."
        )
    encoded = tokenizer(
        first,
        second,
        truncation="longest_first" if max_length else False,
        max_length=max_length,
        return_attention_mask=False,
        return_token_type_ids=False,
    )
    rows = encoded["input_ids"]
    if [] in rows:
        text = first[rows.index([])]
        raise TokenizerError(f"the tokenizer makes no token of the pair that begins {text!r}.")
    return rows


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of the domain, made anew from the same texts byte for byte.

    Each text ends in an end token, alone or in a pair: a pair of texts without one in between
    would not say where the second begins. The 3,755 common characters of GB 2312 are tokens
    too, so that other Chinese text does not fall apart into three bytes a character. A token
    is at most eight bytes, two characters and a bit: that makes the synthetic pairs as many
    tokens long as Qwen's tokenizer makes AFQMC's.

    The folder ``data/tokenizer`` is ``train_tokenizer`` of the texts of ``read_pairs()``,
    saved with ``save_pretrained``.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [*texts, *_common_characters()],
        BpeTrainer(
            vocab_size=8192,
            max_token_length=8,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            special_tokens=[PAD, END],
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}",
        pair=f"$A {END} $B {END}",
        special_tokens=[(END, tokenizer.token_to_id(END))],
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)


def _common_characters() -> list[str]:
    """Level 1 of GB 2312: rows 0xB0 to 0xD7 of the code, of which the last is not full."""
    codes = (bytes((row, cell)) for row in range(0xB0, 0xD8) for cell in range(0xA1, 0xFF))
    return [text for code in codes if (text := code.decode("gb2312", "ignore"))]
