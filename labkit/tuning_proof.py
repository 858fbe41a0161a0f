"""What a tuning is worth: both recipes measured in turn, and that they compute the same."""

from dataclasses import replace

from labkit.exactness import IN_FLOAT32, check_exact
from labkit.measure import compare
from labkit.race import ROUND_STEPS
from labkit.recipe import Recipe
from labkit.report import Report, format_bytes
from labkit.tuning_forecast import peak_bytes
from labkit.tuning_record import Tuning
from labkit.tuning_search import ROOM, WARMUP_STEPS, Search

LEAST_STEPS = 8  # timed, of each of the two


class NotExact(RuntimeError):
    """The tuned recipe computes something else than the given one; ``tuning`` is the record."""

    def __init__(self, message: str, tuning: Tuning) -> None:
        super().__init__(message)
        self.tuning = tuning


def prove(search: Search) -> None:
    """Check the winner and measure it beside the given recipe, which stays if it is as fast.

    Raises:
        NotExact: Losses or gradients differ by more than rounding.
    """
    tuning, forecast = search.tuning, search.forecast
    given, tuned = tuning.given, tuning.recipe
    predicted = forecast.peak_bytes(given)
    tuning.predicted = {"given": predicted, "tuned": forecast.peak_bytes(tuned)}
    has_room = forecast.together_bytes([given, tuned]) <= ROOM * tuning.free_bytes
    _check(search, tuned)
    search.say("measuring the given and the tuned recipe in turn")
    tuning.comparison = compare(
        given if has_room and given != tuned else None,
        tuned,
        search.pairs,
        device=search.device,
        warmup_steps=WARMUP_STEPS,
        timed_steps=max(LEAST_STEPS, tuning.rounds * ROUND_STEPS),
        cache_folder=search.cache_folder,
        progress=search.say,
    )
    before, after = tuning.comparison.before, tuning.comparison.after
    if not has_room:
        tuning.notes.append(
            f"the given recipe was not measured: it is predicted to need "
            f"{format_bytes(predicted)}, which is not free beside the tuned one"
        )
    if _peak(after) > tuning.budget_bytes:
        tuning.notes.append("measured, the tuned recipe's peak is above the budget")
    if before is None or not before.ok:
        return
    fits = max(predicted, _peak(before)) <= tuning.budget_bytes
    faster = tuning.comparison.speed_change_is_clear and tuning.comparison.speed_ratio > 1
    if fits and not faster:
        tuning.recipe = given
        tuning.notes.append("the given recipe stays: what was found is not clearly faster")


def _check(search: Search, tuned: Recipe) -> None:
    """Compare both as they are and, where one rounds to 16 bits, in float32 as well.

    They run one after the other. Where the given recipe has no room even alone, a variant of it
    that computes the same with less stands for it.
    """
    limit = ROOM * search.tuning.free_bytes
    given = search.tuning.given
    standing = [given, *search.space.smaller(search.space.start())]
    fitting = [each for each in standing if search.forecast.peak_bytes(each) <= limit]
    if not fitting:
        search.tuning.notes.append("not checked: nothing that computes the same fits here")
        return
    if fitting[0] != given:
        search.tuning.notes.append(
            "checked against a smaller variant of the given recipe, which itself does not fit"
        )
    given = fitting[0]
    if given == tuned:
        return
    ways = [(given, tuned)]
    exact = tuple(replace(each, **IN_FLOAT32) for each in ways[0])
    peak = max(map(search.forecast.peak_bytes, exact)) if exact != ways[0] else 0
    if 0 < peak <= limit:
        ways.append(exact)
    for one, other in ways:
        search.say("checking that both recipes compute the same")
        check = check_exact(
            one, other, search.pairs, search.device, cache_folder=search.cache_folder
        )
        search.tuning.checks.append(check)
        if not check.ok:
            raise NotExact(
                "the tuned recipe does not compute what the given one does: in "
                f"{check.formats}, losses differ by {check.loss_difference:.1e} and gradients "
                f"by {check.gradient_difference:.1e}. Please report it, with the record.",
                search.tuning,
            )


def _peak(report: Report) -> int:
    return peak_bytes(report.memory) if report.memory else 0
