"""The fastest recipe on this machine that does what a given one does, within a budget of bytes.

Stage by stage a few fields are varied from the best recipe so far (``labkit.tuning_search``):
predictions leave out what does not fit, the others race. The winner is then measured beside the
given recipe, and it is checked that both compute the same (``labkit.tuning_proof``).
"""

import math
import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from labkit.budget import budget_bytes, free_bytes
from labkit.compiling import compile_cache
from labkit.data import Pairs
from labkit.machine import default_device, machine_facts
from labkit.measure import usable_device
from labkit.race import ROUND_STEPS
from labkit.recipe import Recipe
from labkit.report import PAIRS_TO_JUDGE
from labkit.tuning_proof import prove
from labkit.tuning_record import Tuning
from labkit.tuning_search import Search, TuneError

EPOCHS = 3  # planned for, unless somebody says how many steps
ROUNDS = 5
RECOMPILE_LIMIT = 64  # of a function: recipes that race compile the same ones
LEAST_ROUNDS = math.ceil(PAIRS_TO_JUDGE / ROUND_STEPS)


def tune(
    recipe: Recipe,
    pairs: Pairs,
    *,
    fixed: Collection[str] = (),
    budget: str | int | None = None,
    steps: int | None = None,
    rounds: int = ROUNDS,
    device: str | None = None,
    cache_folder: Path | None = None,
    progress: Callable[[Tuning], None] = lambda tuning: None,
) -> Tuning:
    """Search for the fastest recipe that computes what ``recipe`` does.

    Args:
        fixed: Fields that stay as they are.
        budget: Bytes, a size (``4GiB``) or a share of what is free (``80%``) that the peak may
            take; 90 % by default.
        steps: Steps that will be trained: compiling has to pay within them. Three epochs by
            default.
        rounds: Of a race at most, 3 or more.
        cache_folder: Where token ids are kept.
        progress: Shown the tuning after each thing done.

    Returns:
        The tuning; where Ctrl-C ended it, the best recipe until then.

    Raises:
        TuneError: Nothing fits, or there are too few rounds or steps.
        NotExact: The tuned recipe computes something else; its ``tuning`` is the record.
        BudgetError, MeasureError: No such budget or device.
        ModelError, PredictError, TokenizerError: As for a prediction.
    """
    if rounds < LEAST_ROUNDS:
        raise TuneError(f"rounds must be at least {LEAST_ROUNDS}, not {rounds}: too few pairs.")
    steps = EPOCHS * math.ceil(len(pairs) / recipe.batch_size) if steps is None else steps
    if steps < 1:
        raise TuneError(f"steps must be at least 1, not {steps}.")
    where = usable_device(device or default_device())
    free = free_bytes(where)
    tuning = Tuning(
        recipe, frozenset(fixed), budget_bytes(budget, free), free, steps, rounds,
        machine_facts(where.type), pairs.facts(),
    )  # fmt: skip
    search = Search(tuning, pairs, where, cache_folder, progress)
    start = time.perf_counter()
    try:
        graphs = torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT)
        with compile_cache(None, cold=True), graphs:
            search.run()
        search.release()
        prove(search)
    except KeyboardInterrupt:
        if tuning.recipe is None:
            raise
        tuning.stop()
    finally:
        search.release()
        tuning.seconds = time.perf_counter() - start
    search.say("stopped" if tuning.interrupted else "done")
    return tuning
