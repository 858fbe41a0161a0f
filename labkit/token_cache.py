"""Token ids on disk: one flat tensor and offsets, without padding, mapped into memory.

The file says inside what it was made from and what it should hold. One that does not match is
made again, whatever its name or date, so a stale or damaged cache is never trained on.
"""

import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from labkit.data import Pairs
from labkit.tokenizer import encode

CODE_VERSION = "1"  # raise it when this module or ``encode`` changes what it stores
CHUNK = 4096  # pairs tokenised at once

logger = logging.getLogger(__name__)


class CacheError(ValueError):
    """A cache that cannot be written; the message says where and why."""


class _Unusable(Exception):
    """A cache file that must be made again, and why."""


@dataclass(frozen=True)
class Tokens:
    """The ragged rows of token ids: row ``i`` is ``ids[offsets[i] : offsets[i + 1]]``."""

    ids: torch.Tensor  # (all tokens,) int32
    offsets: torch.Tensor  # (pairs + 1,) int64
    labels: torch.Tensor  # (pairs,) int64

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, chosen: list[int]) -> list[torch.Tensor]:
        """The ids of these pairs, as views."""
        starts, ends = self.offsets[chosen].tolist(), self.offsets[1:][chosen].tolist()
        return [self.ids[start:end] for start, end in zip(starts, ends, strict=True)]


def cached_tokens(
    pairs: Pairs,
    tokenizer,
    max_length: int,
    folder: Path,
    *,
    log: Callable[[str], None] = logger.warning,
) -> Tokens:
    """The tokens of ``pairs``, from the cache in ``folder`` or, if need be, made and put there.

    Args:
        pairs: What to tokenise; the file is named after them.
        tokenizer: A fast tokenizer.
        max_length: Tokens per pair at most.
        folder: Created if it does not exist.
        log: Gets one line when a file was there but could not be used.

    Returns:
        Tensors that are mapped from the file, not read into memory.

    Raises:
        CacheError: ``folder`` cannot be written to.
        TokenizerError: A pair cannot be tokenised.
    """
    file = Path(folder) / (re.sub(r"[^\w.-]+", "-", pairs.name) + ".safetensors")
    source = _source(pairs, tokenizer, max_length)
    try:
        return _load(file, source)
    except FileNotFoundError:
        pass  # the first time
    except _Unusable as reason:
        log(f"token cache {file.name} is made again: {reason}.")
    _save(_tokenise(pairs, tokenizer, max_length), source, file)
    return _load(file, source)


def _source(pairs: Pairs, tokenizer, max_length: int) -> dict[str, str]:
    """What the tokens depend on, by the name a reader would use for it."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for setting in ("truncation", "padding"):  # left behind by the last call, not its identity
        del state[setting]
    state["truncation_side"] = tokenizer.truncation_side
    return {
        "data set": _sha256(json.dumps([pairs.first, pairs.second, pairs.labels]).encode()),
        "tokenizer": _sha256(json.dumps(state, sort_keys=True).encode()),
        "max_length": str(max_length),
        "version of the cache": CODE_VERSION,
    }


def _sha256(*parts) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _content(tokens: Tokens) -> str:
    """A checksum of the tensors: their types and their bytes."""
    tensors = vars(tokens).values()
    return _sha256(*(part for t in tensors for part in (str(t.dtype).encode(), t.numpy())))


def _tokenise(pairs: Pairs, tokenizer, max_length: int) -> Tokens:
    ids, lengths = [], []
    for start in range(0, len(pairs), CHUNK):
        chunk = slice(start, start + CHUNK)
        rows = encode(tokenizer, pairs.first[chunk], pairs.second[chunk], max_length)
        lengths += [len(row) for row in rows]
        ids.append(torch.tensor([token for row in rows for token in row], dtype=torch.int32))
    return Tokens(
        ids=torch.cat(ids),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        labels=torch.tensor(pairs.labels),
    )


def _save(tokens: Tokens, source: dict[str, str], file: Path) -> None:
    """Write all or nothing: a reader never sees half a file, whenever this process dies."""
    metadata = source | {"content": _content(tokens)}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            unfinished = Path(folder) / file.name
            save_file(vars(tokens), unfinished, metadata)
            unfinished.replace(file)
    except (OSError, SafetensorError) as error:
        raise CacheError(
            f"the token cache {file} cannot be written ({error}); give yourself the right to "
            "write there."
        ) from error


def _load(file: Path, source: dict[str, str]) -> Tokens:
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tokens = Tokens(*(opened.get_tensor(n) for n in ("ids", "offsets", "labels")))
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError) as error:
        raise _Unusable(f"it is damaged ({str(error).partition(':')[0]})") from error
    for name, value in source.items():
        if metadata.get(name) != value:
            raise _Unusable(f"it was made with another {name}")
    if metadata.get("content") != _content(tokens):
        raise _Unusable("it is damaged (its checksum differs)")
    return tokens
