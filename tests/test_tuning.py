import math
import random
from dataclasses import dataclass, field, replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from labkit import exactness, tuning_forecast, tuning_proof, tuning_search
from labkit.budget import BudgetError, budget_bytes
from labkit.compiling import CompilerMissing
from labkit.exactness import Exactness, check_exact
from labkit.measure import MeasureError
from labkit.precision import has_native
from labkit.predict.gpus import find_gpu
from labkit.race import ROUND_STEPS, race
from labkit.recipe import Recipe, differences
from labkit.report import Comparison, Memory, Report
from labkit.step import TrainingStep, build_step
from labkit.trial import Trial
from labkit.tuning import TuneError, tune
from labkit.tuning_entrant import Entrant, if_it_pays
from labkit.tuning_forecast import Forecast
from labkit.tuning_proof import NotExact, prove
from labkit.tuning_record import Row, Tuning
from labkit.tuning_space import STAGES, Space

TINY = Recipe(model="qwen3-tiny", batch_size=8, max_length=32)
VARIED = {"padding", "weights", "autocast", "optimizer", "num_workers", "compile", "threads"}
ALL = frozenset(VARIED | {"last_token_only", "checkpoint_every", "micro_batches"})
CPU = torch.device("cpu")


@dataclass
class Fake:
    """An entrant whose steps take what the test says."""

    times: object
    report: Report = field(default_factory=lambda: Report(recipe=None))
    status: str = "racing"
    lasts: int = 10**9

    def run(self):
        if len(self.report.step_seconds) >= self.lasts:
            self.status = "failed"
            return False
        self.report.step_seconds.append(next(self.times))
        return True

    @property
    def steps(self):
        return len(self.report.step_seconds)


def noisy(seconds, seed, spread=0.03):
    draw = random.Random(seed)
    return Fake(seconds * draw.uniform(1 - spread, 1 + spread) for _ in count())


def test_the_fastest_wins():
    entrants = [noisy(seconds, n) for n, seconds in enumerate((1.0, 0.95, 0.6, 0.7))]
    assert race(entrants[0], entrants[1:], rounds=5) is entrants[2]
    assert entrants[3].status == "out"


def test_equal_times_keep_the_incumbent():
    entrants = [Fake(iter([1.0] * 20)) for _ in range(3)]
    assert race(entrants[0], entrants[1:], rounds=5) is entrants[0]
    assert [each.status for each in entrants] == ["racing"] * 3


def test_a_much_slower_one_drops_out_early():
    incumbent, close, slow = noisy(1.0, 0), noisy(1.01, 1), noisy(2.0, 2)
    race(incumbent, [close, slow], rounds=5)
    assert slow.status == "out"
    assert slow.steps == 2 * ROUND_STEPS
    assert incumbent.steps == 5 * ROUND_STEPS


def test_a_little_slower_drops_out_by_the_sign_test_only():
    incumbent, slower = Fake(iter([1.0] * 20)), Fake(iter([1.05] * 20))
    race(incumbent, [slower], rounds=5)
    assert slower.status == "out"
    assert slower.steps == 6


@pytest.mark.parametrize("seed", range(20))
def test_noise_does_not_drop_the_fastest(seed):
    """Single slow steps, as a busy machine has them, with every entrant."""
    draw = random.Random(seed)

    def disturbed(seconds):
        return Fake(seconds * (5 if draw.random() < 0.15 else 1) for _ in count())

    incumbent, fast, other = disturbed(1.0), disturbed(0.8), disturbed(0.95)
    winner = race(incumbent, [fast, other], rounds=6)
    assert fast.status == "racing"
    assert winner in (fast, incumbent)


def test_one_lucky_step_is_no_win():
    incumbent, lucky = Fake(iter([1.0] * 20)), Fake(iter([0.1, *[1.02] * 20]))
    assert race(incumbent, [lucky], rounds=3) is incumbent


def test_fewer_than_six_pairs_never_win():
    incumbent, fast = Fake(iter([1.0] * 20)), Fake(iter([0.5] * 20))
    assert race(incumbent, [fast], rounds=2) is incumbent
    assert race(Fake(iter([1.0] * 20)), [fresh := Fake(iter([0.5] * 20))], rounds=9) is fresh
    assert fresh.steps == 6


def test_who_cannot_go_on_is_out_of_the_race_and_the_others_go_on():
    incumbent, failing, fast = noisy(1.0, 0), noisy(0.1, 1), noisy(0.5, 2)
    failing.lasts = 1
    assert race(incumbent, [failing, fast], rounds=4) is fast
    assert failing.status == "failed"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 4 * 2**30), ("512 MiB", 512 * 2**20), ("1.5gib", 3 * 2**29), ("1000", 1000),
        (2048, 2048), ("2GB", 2 * 10**9), ("80%", 8 * 2**30), (None, 9 * 2**30), ("7b", 7),
    ],
)  # fmt: skip
def test_a_budget_is_bytes_a_size_or_a_share(text, expected):
    assert budget_bytes(text, 10 * 2**30) == expected


@pytest.mark.parametrize("text", ["", "much", "4 apples", "-1", "0", "0%", "4GiB!", "nan"])
def test_a_budget_that_is_none_says_what_it_may_be(text):
    with pytest.raises(BudgetError, match="4GiB or 512MiB, or a share"):
        budget_bytes(text, 10 * 2**30)


def test_a_budget_is_no_more_than_is_free():
    with pytest.raises(BudgetError, match=r"11.00 GiB, and 10.00 GiB are free"):
        budget_bytes("11GiB", 10 * 2**30)


FREE_FIELDS = {
    "padding", "last_token_only", "shared_prefix", "weights", "autocast", "optimizer",
    "num_workers", "threads", "checkpoint_every", "micro_batches", "compile", "train_base",
    "cached",
}  # fmt: skip


@pytest.mark.parametrize("instruction", ["", "Same?"])
def test_only_fields_that_change_no_gradient_are_varied(instruction):
    given = replace(TINY, instruction=instruction, train_base=True)
    space = Space(given, half="bfloat16", threads=(0, 8))
    start = space.start()
    found = [start, *(each for stage in STAGES for each in space.candidates(stage, start))]
    found += [each for kind in space.kinds(start) for each in space.smaller(kind)]
    changed = set().union(*(differences(given, each) for each in found))
    assert changed <= FREE_FIELDS
    assert FREE_FIELDS - changed == (set() if instruction else {"shared_prefix"})
    assert {each.padding for each in found} == {"longest", "none"}
    assert len(space.candidates("padding", start)) == (4 if instruction else 2)


@pytest.mark.parametrize("name", sorted(FREE_FIELDS))
def test_a_fixed_field_stays(name):
    space = Space(TINY, frozenset({name}), half="bfloat16", threads=(0, 8))
    start = space.start()
    found = [start, *(each for stage in STAGES for each in space.candidates(stage, start))]
    assert {getattr(each, name) for each in found} == {getattr(TINY, name)}


def test_grouped_pairs_stay_together():
    space = Space(replace(TINY, padding="grouped"))
    assert space.candidates("padding", space.start()) == []


def test_without_a_16_bit_format_precision_stays():
    assert Space(TINY).candidates("precision", TINY) == []


def test_workers_are_tried_where_making_batches_takes_a_while():
    def workers(share):
        found = Space(TINY).candidates("optimizer and loader", TINY, data_share=share)
        return {each.num_workers for each in found}

    assert workers(0.5) == {0, 1}
    assert workers(0.001) == {0}


@pytest.fixture
def known_bytes(monkeypatch):
    """Bytes that are predicted: so many a pair of a part, half of it recomputed."""

    def peak(forecast, recipe):
        size = 100 * recipe.batch_size // recipe.micro_batches
        size //= 2 if recipe.checkpoint_every else 1
        return size + (50 if recipe.weights == "float32" else 20)

    monkeypatch.setattr(Forecast, "peak_bytes", peak)
    monkeypatch.setattr(Forecast, "together_bytes", lambda self, recipes: 0)


@pytest.fixture
def known_times(monkeypatch):
    """Races of known step times, nothing built; a test sets the factor of a field's value."""
    factors = {}

    class FakeEntrant(Fake):
        def __init__(self, row):
            values = row.recipe.to_dict().items()
            seconds = math.prod(factors.get((name, str(value)), 1.0) for name, value in values)
            super().__init__(iter(lambda: seconds, None))
            self.row = row

        @property
        def status(self):
            return self.row.status

        @status.setter
        def status(self, value):
            if hasattr(self, "row"):
                self.row.status = value

        def run(self):
            going = super().run()
            self.row.report = {
                "step_seconds": self.report.step_seconds,
                "data_seconds": [0.0] * self.steps,
            }
            return going

        def again(self, row):
            self.row, self.report = row, Report(recipe=None)

        def release(self):
            pass

    monkeypatch.setattr(tuning_search.Search, "_entrant", lambda self, row: FakeEntrant(row))
    monkeypatch.setattr("labkit.tuning.prove", lambda search: None)
    return factors


NO_FORMATS = {"weights", "autocast", "compile"}


def test_stages_go_on_from_the_winner(pairs, known_bytes, known_times):
    known_times |= {("last_token_only", "True"): 0.5, ("optimizer", "adamw_fused"): 0.8}
    seen = []
    found = tune(
        TINY, pairs, fixed=NO_FORMATS, device="cpu",
        progress=lambda tuning: seen.append(tuning.doing),
    )  # fmt: skip
    assert (found.recipe.padding, found.recipe.last_token_only) == ("none", True)
    assert found.recipe.optimizer == "adamw_fused"
    winners = [row for row in found.rows if row.status == "winner"]
    assert [row.stage for row in winners] == ["padding", "optimizer and loader", "parts"]
    assert [row.speed_to_leader for row in winners] == [1.0] * 3
    assert seen[0] == "looking for a recipe that fits"
    assert seen[-1] == "done"


def test_what_is_over_the_budget_does_not_race(pairs, known_bytes, known_times):
    known_times |= {("micro_batches", "1"): 0.1, ("micro_batches", "8"): 0.5}
    found = tune(TINY, pairs, fixed=NO_FORMATS, device="cpu", budget=450)
    rows = {(row.stage, row.change): row for row in found.rows}
    assert found.rows[0].change == (
        "to begin with, micro_batches: 1 → 2, cached: false → true, fast_dropout: false → true"
    )
    too_large = rows["parts", "micro_batches: 2 → 1"]
    assert (too_large.status, too_large.predicted_peak_bytes) == ("pruned", 850)
    assert too_large.step_seconds is None
    recomputed = rows["parts", "micro_batches: 2 → 1, checkpoint_every: 0 → 1"]
    assert (recomputed.status, recomputed.predicted_peak_bytes) == ("winner", 450)
    assert found.recipe == recomputed.recipe


def test_other_formats_are_found_where_only_they_fit(pairs, known_bytes, known_times):
    if not has_native(torch.bfloat16, CPU):
        pytest.skip("this CPU has no bfloat16")
    found = tune(TINY, pairs, fixed={"compile"}, device="cpu", budget=75)
    assert found.recipe.weights == "bfloat16"
    assert found.recipe.micro_batches == 8


def test_nothing_fits_is_one_sentence_with_the_least(pairs, known_bytes):
    with pytest.raises(TuneError, match=r"nothing fits into 60 B: the least .* is 100 B\."):
        tune(TINY, pairs, fixed=NO_FORMATS, device="cpu", budget=60)


def test_recipes_without_room_beside_the_best_do_not_race(
    pairs, known_bytes, known_times, monkeypatch
):
    monkeypatch.setattr(Forecast, "together_bytes", lambda self, recipes: 2**60)
    found = tune(TINY, pairs, fixed=NO_FORMATS, device="cpu")
    assert {row.status for row in found.rows} == {"failed"}
    assert "not beside the best recipe" in found.rows[0].reason


def test_a_stage_races_in_heats_where_memory_is_short(
    pairs, known_bytes, known_times, monkeypatch
):
    known_times[("last_token_only", "True")] = 0.5
    monkeypatch.setattr(
        Forecast, "together_bytes", lambda self, recipes: 2**60 * (len(recipes) > 2)
    )
    found = tune(TINY, pairs, fixed=ALL - {"padding", "last_token_only"}, device="cpu")
    assert [row.status for row in found.rows] == ["winner", "even", "out", "winner"]
    assert found.recipe.last_token_only


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"rounds": 2}, TuneError, "rounds must be at least 3"),
    ({"steps": 0}, TuneError, "steps must be at least 1"),
    ({"device": "tpu"}, MeasureError, "device 'tpu'"),
])  # fmt: skip
def test_what_cannot_be_tuned_is_said_before_the_work(pairs, options, error, words):
    with pytest.raises(error, match=words):
        tune(TINY, pairs, **{"device": "cpu"} | options)


def compiled_entrants():
    """A compiled entrant that took 50 s to prepare, and an eager one; steps of 1 s and 2 s."""

    def entrant(seconds, prepare_seconds, mode):
        trial = type("Trial", (), {"report": Report(recipe=None)})()
        trial.report.compile = mode and {"first_step_seconds": 41.0}
        row = Row("compile", replace(TINY, compile=mode or "none"), "")
        row.report = {"step_seconds": [seconds]}
        made = Entrant(row, trial)
        made.prepare_seconds = prepare_seconds
        return made

    return entrant(1.0, 55.0, "default"), entrant(2.0, 5.0, None)


@pytest.mark.parametrize(("steps", "wins"), [(51, True), (50, False), (3, False)])
def test_compiling_wins_where_it_pays_within_the_steps(steps, wins):
    compiled, eager = compiled_entrants()
    winner = if_it_pays(compiled, eager, [compiled], steps)
    assert winner is (compiled if wins else eager)
    assert compiled.row.pays_after_steps == 50
    assert ("pays after 50 steps" in compiled.row.reason) is not wins


def test_compiling_that_is_slower_never_pays():
    eager, compiled = compiled_entrants()
    assert if_it_pays(eager, eager, [compiled], 10**9) is eager
    assert compiled.row.pays_after_steps == math.inf


@pytest.mark.parametrize(
    "change",
    [
        {"padding": "none", "last_token_only": True}, {"micro_batches": 3},
        {"checkpoint_every": 1}, {"optimizer": "adamw_fused"}, {"train_base": True},
        {"num_workers": 1, "cached": True},
    ],
)  # fmt: skip
def test_what_tuning_varies_computes_the_same(pairs, change, tmp_path):
    check = check_exact(TINY, replace(TINY, **change), pairs, CPU, cache_folder=tmp_path)
    assert check.formats == "float32"
    assert len(check.losses) == len(check.gradients) == 3
    assert check.ok


def test_a_16_bit_format_is_the_same_up_to_its_rounding(pairs):
    check = check_exact(TINY, replace(TINY, weights="bfloat16"), pairs, CPU)
    assert check.formats == "16 bits"
    assert check.ok


@pytest.mark.parametrize("change", [
    {"learning_rate": 0.01}, {"padding": "grouped"}, {"seed": 1}, {"lora_alpha": 32},
])  # fmt: skip
def test_another_recipe_is_found_out(pairs, change):
    assert not check_exact(TINY, replace(TINY, **change), pairs, CPU).ok


def test_what_is_no_number_is_not_the_same():
    assert Exactness("float32", [(1.0, 1.0)], [0.0]).ok
    assert not Exactness("float32", [(1.0, math.nan)], [0.0]).ok
    assert not Exactness("float32", [(1.0, 1.0)], [0.0, math.nan]).ok


ONE_STAGE = {"fixed": ALL - {"optimizer"}, "device": "cpu", "rounds": 3}


def test_a_whole_tuning(pairs, tmp_path):
    seen = set()
    found = tune(
        replace(TINY, train_base=True), pairs, cache_folder=tmp_path, **ONE_STAGE,
        progress=lambda tuning: seen.update((r.change, r.status) for r in tuning.rows),
    )  # fmt: skip
    assert {row.stage for row in found.rows} == {"optimizer and loader"}
    assert ('optimizer: "adamw" → "adamw_fused"', "racing") in seen
    for row in found.rows:
        assert 3 <= len(row.report["step_seconds"]) <= 6
        assert row.measured_peak_bytes == pytest.approx(row.predicted_peak_bytes, abs=512)
        assert sum(row.status == "winner" for row in found.rows) == 1
    assert found.comparison.before.recipe == replace(TINY, train_base=True)
    assert len(found.comparison.speed_ratios) == 8
    assert [check.ok for check in found.checks] == [True]
    assert found.machine["cores"] >= 1
    assert found.data == pairs.facts()
    assert found.predicted["given"] > found.predicted["tuned"]
    assert found.recipe.train_base is (found.recipe == found.given)


def test_a_tuned_recipe_that_computes_something_else_fails(pairs, monkeypatch, tmp_path):
    original = TrainingStep.loss

    def wrong(step, part, **options):
        return original(step, part, **options) * (1.001 if not step.recipe.train_base else 1)

    monkeypatch.setattr(TrainingStep, "loss", wrong)
    with pytest.raises(NotExact, match=r"losses differ by 1\.0e-03") as caught:
        tune(replace(TINY, train_base=True), pairs, cache_folder=tmp_path, **ONE_STAGE)
    assert not caught.value.tuning.checks[0].ok


@pytest.mark.parametrize(("error", "words"), [
    (MemoryError(), "out of memory"),
    (CompilerMissing("needs a compiler"), "skipped: needs a compiler"),
    (RuntimeError("no kernel\nmore"), "RuntimeError: no kernel"),
])  # fmt: skip
def test_a_candidate_that_fails_is_a_result(pairs, monkeypatch, tmp_path, error, words):
    original = Trial.prepare

    def prepare(trial):
        if trial.recipe.optimizer == "adamw_fused":
            raise error
        original(trial)

    monkeypatch.setattr(Trial, "prepare", prepare)
    monkeypatch.setattr("labkit.tuning.prove", lambda search: None)
    found = tune(TINY, pairs, cache_folder=tmp_path, **ONE_STAGE)
    first, failed = found.rows
    assert (first.status, failed.status) == ("winner", "failed")
    assert words in failed.reason
    assert found.recipe.optimizer == "adamw"


def test_a_beginning_that_fails_is_one_sentence(pairs, monkeypatch, tmp_path):
    def prepare(trial):
        raise MemoryError

    monkeypatch.setattr(Trial, "prepare", prepare)
    with pytest.raises(TuneError, match="the recipe to begin with cannot be measured"):
        tune(TINY, pairs, cache_folder=tmp_path, **ONE_STAGE)


def test_ctrl_c_keeps_the_best_so_far(pairs, known_bytes, known_times):
    known_times[("last_token_only", "True")] = 0.5

    def stop(tuning):
        if tuning.doing.startswith("optimizer and loader: racing"):
            raise KeyboardInterrupt

    found = tune(TINY, pairs, fixed=NO_FORMATS, device="cpu", progress=stop)
    assert found.interrupted
    assert found.recipe.last_token_only
    assert found.comparison is None
    assert found.rows[-1].reason == "stopped before it was decided"


def test_ctrl_c_before_anything_is_found_is_ctrl_c(pairs, monkeypatch):
    def stop(forecast, recipe):
        raise KeyboardInterrupt

    monkeypatch.setattr(Forecast, "peak_bytes", stop)
    with pytest.raises(KeyboardInterrupt):
        tune(TINY, pairs, device="cpu")


def test_another_budget_than_bytes_is_refused(pairs):
    with pytest.raises(BudgetError, match="budget must be"):
        tune(TINY, pairs, budget="lots", device="cpu")


def search_that_found(tuned, *, peak=100, together=0):
    """A search that is over; its forecast says what the test wants."""
    tuning = Tuning(TINY, frozenset(), 1000, 2000, 10, 3, recipe=tuned)
    forecast = SimpleNamespace(
        peak_bytes=lambda recipe: peak, together_bytes=lambda recipes: together
    )
    return SimpleNamespace(
        tuning=tuning, forecast=forecast, space=Space(TINY), pairs=None, device=CPU,
        cache_folder=None, say=lambda text: None,
    )  # fmt: skip


@pytest.fixture
def compared(monkeypatch):
    """Nothing is run; a test sets the seconds of the tuned steps, the given ones take 1."""
    seconds, calls = [1.0] * 8, []

    def compare(before, after, pairs, **options):
        calls.append((before, after))
        memory = Memory(100, {}, {})
        reports = [
            Report(recipe=recipe, memory=memory, step_seconds=times) if recipe else None
            for recipe, times in ((before, [1.0] * 8), (after, seconds))
        ]
        return Comparison(after=reports[1], before=reports[0])

    monkeypatch.setattr(tuning_proof, "compare", compare)
    exact = Exactness("float32", [(1.0, 1.0)], [0.0])
    monkeypatch.setattr(tuning_proof, "check_exact", lambda *_, **__: exact)
    return SimpleNamespace(seconds=seconds, calls=calls)


FUSED = replace(TINY, optimizer="adamw_fused")


def test_the_given_recipe_stays_unless_the_tuned_one_is_clearly_faster(compared):
    search = search_that_found(FUSED)
    prove(search)
    assert search.tuning.recipe == TINY
    assert "not clearly faster" in search.tuning.notes[0]
    compared.seconds[:] = [0.5] * 8
    search = search_that_found(FUSED)
    prove(search)
    assert search.tuning.recipe == FUSED
    assert search.tuning.notes == []


def test_a_given_recipe_over_the_budget_does_not_stay(compared):
    search = search_that_found(FUSED, peak=1001)
    prove(search)
    assert search.tuning.recipe == FUSED


def test_a_given_recipe_without_room_is_not_run(compared):
    search = search_that_found(FUSED, peak=5000, together=5000)
    prove(search)
    assert compared.calls == [(None, FUSED)]
    assert search.tuning.recipe == FUSED
    unchecked, unmeasured = search.tuning.notes
    assert unchecked == "not checked: nothing that computes the same fits here"
    assert "the given recipe was not measured: it is predicted to need 4.9 KiB" in unmeasured


def test_gradients_of_another_size_are_not_the_same(pairs, monkeypatch):
    built = []

    def build(*args, **options):
        step = build_step(*args, **options)
        for parameter in step.trained if built else ():
            parameter.register_hook(lambda gradient: 3 * gradient)  # clipping would hide it
        built.append(step)
        return step

    monkeypatch.setattr(exactness, "build_step", build)
    check = check_exact(TINY, replace(TINY, optimizer="adamw_fused"), pairs, CPU)
    assert check.gradient_difference == pytest.approx(2, rel=1e-3)
    assert not check.ok


def test_16_bit_recipes_are_compared_in_float32_too(compared):
    search = search_that_found(replace(FUSED, weights="bfloat16"))
    prove(search)
    assert len(search.tuning.checks) == 2
    search = search_that_found(FUSED)
    prove(search)
    assert len(search.tuning.checks) == 1


def test_a_measured_peak_over_the_budget_is_said(compared, monkeypatch):
    search = search_that_found(FUSED)
    search.tuning.budget_bytes = 99
    prove(search)
    assert "above the budget" in search.tuning.notes[0]


def test_on_a_card_what_is_reserved_has_to_fit(pairs, monkeypatch):
    monkeypatch.setattr(tuning_forecast, "local_card", lambda: find_gpu("t4"))
    forecast = Forecast(pairs, torch.device("cuda"))
    memory = forecast.memory(TINY)
    assert forecast.peak_bytes(TINY) == memory.peak_reserved_bytes > memory.peak_allocated_bytes
    both = forecast.together_bytes([TINY, replace(TINY, compile="default")])
    assert both == memory.peak_reserved_bytes + memory.by_phase["before"]
    assert len(forecast.memories) == 1
