"""The stages of a tuning: candidates are predicted, what fits races, the winner goes on."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from labkit.data import Pairs
from labkit.model_source import ModelError
from labkit.race import ROUND_STEPS, pairs_of, race
from labkit.recipe import Recipe, describe_change
from labkit.report import format_bytes
from labkit.trial import Trial
from labkit.tuning_entrant import Entrant, if_it_pays
from labkit.tuning_forecast import Forecast
from labkit.tuning_record import Row, Tuning
from labkit.tuning_space import PARTS_TRIED, STAGES, space_on

ROOM = 0.9  # share of what is free that recipes racing together may need
WARMUP_STEPS = 2


class TuneError(ValueError):
    """A tuning that cannot be made as asked; the message says what to change."""


class Search:
    """The stages of a tuning.

    Attributes:
        best: The entrant whose recipe is the best so far, still built; None before a race.
    """

    def __init__(
        self,
        tuning: Tuning,
        pairs: Pairs,
        device: torch.device,
        cache_folder: Path | None,
        progress: Callable[[Tuning], None],
    ) -> None:
        self.tuning, self.pairs, self.device = tuning, pairs, device
        self.cache_folder, self.progress = cache_folder, progress
        self.space = space_on(device, tuning.given, tuning.fixed)
        self.forecast = Forecast(pairs, device)
        self.best: Entrant | None = None

    def say(self, text: str) -> None:
        """Tell what is being done."""
        self.tuning.doing = text
        self.progress(self.tuning)

    def release(self) -> None:
        """Give the memory of the best recipe back."""
        if self.best is not None:
            self.best.release()
            self.best = None

    def run(self) -> None:
        """Find a recipe that fits, then vary it stage by stage."""
        self.tuning.recipe = self._start()
        share = 1.0
        for stage in STAGES:
            waiting = list(self._waiting(stage, share))
            for heat in self._heats(waiting):
                self._race(stage, heat)
                share = self.best.row.data_share

    def _start(self) -> Recipe:
        """The given recipe, as much of it saved as has to be."""
        self.say("looking for a recipe that fits")
        least = []
        for kind in self.space.kinds(self.space.start()):
            smaller = self.space.smaller(kind)
            try:
                least.append(self.forecast.peak_bytes(smaller[-1]))
                if least[-1] <= self.tuning.budget_bytes:
                    return next(each for each in smaller if self._fits(each))
            except ModelError:
                if not least:
                    raise  # of the recipe that was given
        raise TuneError(
            f"nothing fits into {format_bytes(self.tuning.budget_bytes)}: the least that was "
            f"found is {format_bytes(min(least))}. Raise --budget, or lower batch_size or "
            "max_length."
        )

    def _fits(self, recipe: Recipe) -> bool:
        return self.forecast.peak_bytes(recipe) <= self.tuning.budget_bytes

    def _waiting(self, stage: str, data_share: float) -> Iterator[Row]:
        """The candidates of a stage that fit; the others are in the table, too."""
        best, found = self.tuning.recipe, []
        for recipe in self.space.candidates(stage, best, data_share=data_share):
            if stage == "parts" and self._is_idle(recipe, [best, *found]):
                continue
            row = Row(stage, recipe, describe_change(best, recipe))
            self.tuning.rows.append(row)
            self.say(f"{stage}: predicting {row.change}")
            try:
                row.predicted_peak_bytes = self.forecast.peak_bytes(recipe)
            except ModelError as error:
                row.status, row.reason = "failed", str(error)
                continue
            if row.predicted_peak_bytes > self.tuning.budget_bytes:
                row.status, row.reason = "pruned", "over the budget"
                continue
            found.append(recipe)
            yield row

    def _is_idle(self, recipe: Recipe, fitting: list[Recipe]) -> bool:
        """Whether enough is tried already that recomputes no more, in no more parts."""
        every, parts = recipe.checkpoint_every, recipe.micro_batches
        alike = [each.micro_batches for each in fitting if each.checkpoint_every == every]
        lighter = [each.micro_batches for each in fitting if each.checkpoint_every < every]
        return len(alike) >= PARTS_TRIED or any(other <= parts for other in lighter)

    def _heats(self, waiting: list[Row]) -> Iterator[list[Row]]:
        """The rows in groups that have room beside the best recipe."""
        room, heat = ROOM * self.tuning.free_bytes, []
        for row in waiting:
            recipes = [self.tuning.recipe, *(each.recipe for each in heat)]
            if self.forecast.together_bytes([*recipes, row.recipe]) <= room:
                heat.append(row)
                continue
            if heat:
                yield heat
            heat = [row]
            if self.forecast.together_bytes([self.tuning.recipe, row.recipe]) > room:
                row.status = "failed"
                row.reason = "it fits, but not beside the best recipe, with which it would race"
                heat = []
        if heat:
            yield heat

    def _race(self, stage: str, rows: list[Row]) -> None:
        """Measure the rows and the best recipe in turn; the winner is the best recipe then."""
        first = Row(stage, self.tuning.recipe, "the best so far")
        if self.best is None:
            change = describe_change(self.tuning.given, first.recipe)
            first.change = f"to begin with, {change}" if change else "as given"
        first.predicted_peak_bytes = self.forecast.peak_bytes(first.recipe)
        self.tuning.rows.insert(self.tuning.rows.index(rows[0]), first)
        if self.best is None:
            self.best = self._entrant(first)
        else:
            self.best.again(first)
        if first.status == "failed":
            raise TuneError(
                f"the recipe to begin with cannot be measured ({first.reason}); it is "
                f"predicted to need {format_bytes(first.predicted_peak_bytes)}."
            )
        entrants = [entrant for row in rows if (entrant := self._entrant(row))]
        line = [self.best, *entrants]
        for entrant in line:
            entrant.status = "racing"

        def see(leader: Entrant) -> None:
            for entrant in line:
                entrant.row.speed_to_leader = pairs_of(entrant, leader).speed_ratio
            self.say(f"{stage}: racing, {len(self.best.report.step_seconds)} steps each")

        winner = race(self.best, entrants, rounds=self.tuning.rounds, see=see)
        if stage == "compile":
            winner = if_it_pays(winner, self.best, entrants, self.tuning.steps)
        for entrant in line:
            if entrant.status == "racing":
                entrant.status = "out" if entrant is self.best else "even"
            if entrant is not winner:
                entrant.release()
        self.best, self.tuning.recipe, winner.status = winner, winner.row.recipe, "winner"
        self.say(f"{stage}: {winner.row.change}")

    def _entrant(self, row: Row) -> Entrant | None:
        """The row's recipe, built and warm; None where that is not possible."""
        self.say(f"{row.stage}: building {row.change}")
        try:
            entrant = Entrant(
                row,
                Trial(
                    row.recipe, self.pairs, self.device,
                    warmup_steps=WARMUP_STEPS,
                    timed_steps=self.tuning.rounds * ROUND_STEPS,
                    cache_folder=self.cache_folder,
                    emulate=False,
                    progress=lambda text: self.say(f"{row.stage}: {row.change}: {text}"),
                ),
            )  # fmt: skip
        except ModelError as error:
            row.status, row.reason = "failed", str(error)
            return None
        if not entrant.prepare():
            return None
        if (row.measured_peak_bytes or 0) > self.tuning.budget_bytes:
            entrant.release()
            row.status, row.reason = "pruned", "measured, it is over the budget"
            return None
        return entrant
