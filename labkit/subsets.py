"""Parts of a set of pairs, drawn by a seed: a sample to look at, a share that is held out."""

import hashlib
import random
from dataclasses import replace

from labkit.data import TRAINING_FILE, DataError, Pairs, read_pairs

HELD_OUT = 0.1  # of the pairs of a file, where there are no others to validate on
SPLIT_SEED = 0  # the same pairs are held out whatever a recipe's seed


def pairs_for_training(
    data: str | None = None, validation: str | None = None, *, skip_bad: bool = False
) -> tuple[Pairs, Pairs]:
    """The pairs to train on, and others to validate on.

    Args:
        data: A file as ``read_pairs`` takes it; the synthetic training pairs if left out.
        validation: A file, or the share of ``data`` to hold out. If left out, a tenth; for
            the synthetic pairs, those that come with them for this.
        skip_bad: Leave bad rows out.

    Raises:
        DataError: As ``read_pairs`` and ``hold_out`` say.
    """
    pairs = read_pairs(data, skip_bad=skip_bad)
    if validation is None and data is None:
        validation = str(TRAINING_FILE.with_name("dev.jsonl"))
    try:
        share = HELD_OUT if validation is None else float(validation)
    except ValueError:
        return pairs, read_pairs(validation, skip_bad=skip_bad)
    return hold_out(pairs, share, SPLIT_SEED)


def shared_pairs(pairs: Pairs, others: Pairs) -> int:
    """How many of the others are among the pairs, in either order of their texts."""
    known = set(_unordered(pairs))
    return sum(texts in known for texts in _unordered(others))


def sample(pairs: Pairs, count: int, seed: int) -> Pairs:
    """``count`` of the pairs in their order, drawn by ``seed``; all of them if there are fewer.

    Raises:
        DataError: ``count`` is below 1.
    """
    if count < 1:
        raise DataError(f"a sample needs at least 1 pair, not {count}.")
    if count >= len(pairs):
        return pairs
    chosen = sorted(random.Random(seed).sample(range(len(pairs)), count))
    return _subset(pairs, chosen, f"{count} of {pairs.name}")


def hold_out(pairs: Pairs, share: float, seed: int) -> tuple[Pairs, Pairs]:
    """Split into pairs to train on and a share, drawn by ``seed``, that training never sees.

    A pair that occurs more than once, in either order of its texts, is on one side only.

    Raises:
        DataError: ``share`` is not between 0 and 1, or one side would be empty.
    """
    if not 0 < share < 1:
        raise DataError(f"the share that is held out must be between 0 and 1, not {share}.")
    groups: dict[frozenset[str], list[int]] = {}
    for row, texts in enumerate(_unordered(pairs)):
        groups.setdefault(texts, []).append(row)
    order = list(groups.values())
    random.Random(seed).shuffle(order)
    wanted, held = round(share * len(pairs)), []
    for rows in order:
        if len(held) + len(rows) <= wanted:
            held += rows
    kept = sorted(set(range(len(pairs))) - set(held))
    if not held or not kept:
        raise DataError(
            f"{pairs.name} has {len(pairs)} pairs, {len(order)} of them different: too few to "
            f"hold out {share:g} of them."
        )
    return (
        _subset(pairs, kept, f"{pairs.name}, training part"),
        _subset(pairs, sorted(held), f"{pairs.name}, held-out part"),
    )


def _unordered(pairs: Pairs) -> list[frozenset[str]]:
    return [frozenset(texts) for texts in zip(pairs.first, pairs.second, strict=True)]


def _subset(pairs: Pairs, rows: list[int], name: str) -> Pairs:
    return replace(
        pairs,
        first=[pairs.first[row] for row in rows],
        second=[pairs.second[row] for row in rows],
        labels=[pairs.labels[row] for row in rows],
        name=name,
        sha256=hashlib.sha256(f"{pairs.sha256} {rows}".encode()).hexdigest(),
    )
