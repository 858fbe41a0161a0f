"""Records as a run leaves them, made without measuring anything."""

from labkit.recipe import PROFILES, ladder
from labkit.records import Record
from labkit.report import OWNERS, PHASES, Comparison, Fit, Memory, Report

STEPS = ladder(PROFILES["small"].recipe)
PEAKS = dict(zip(STEPS, (4000, 3000, 1500, 1500, 800, 900, 900, 700), strict=True))
RATIOS = dict(zip(STEPS, (1, 1.25, 0.8, 2, 1, 1.5, 1.1, 2.5), strict=True))
MACHINE = {
    "name": "Abacus, 2 cores",
    "cpu": "Abacus",
    "cores": 2,
    "threads": 2,
    "memory_bytes": 8 * 2**30,
    "device": "cpu",
    "device_name": "Abacus",
    "cpu_capability": "AVX512",
    "os": "Linux 6",
    "python": "3.11.7",
    "versions": {
        "torch": "2.13.0",
        "transformers": "5.24.0",
        "peft": "0.21.2",
        "tokenizers": "0.23.3",
        "labkit": "0.1.0",
    },
    "commit": "abc1234",
}
CARD = {"name": "NVIDIA RTX 4090 24GB", "device": "cuda", "gpu": "rtx-4090"}
BATCH = {"pairs": 32, "tokens": 64, "padded": True, "why": "the longest"}
FORMATS = {"weights": "float32", "autocast": "none"}
DATA = {"sha256": "d" * 64, "rows": 1000, "source": "synthetic"}


def make_report(recipe, peak=1000, seconds=(1.0, 1.1, 0.9) * 2, **values):
    """A report with a peak in MiB and step times in seconds."""
    peak_bytes = peak * 2**20
    memory = Memory(
        peak_bytes,
        by_phase=dict.fromkeys(PHASES, peak_bytes // 2) | {"backward": peak_bytes},
        by_owner=dict.fromkeys(OWNERS, 0) | {"activations": peak_bytes},
        timeline=[(peak_bytes // 2, "forward"), (peak_bytes, "backward")],
    )
    defaults = {
        "memory": memory,
        "step_seconds": list(seconds),
        "real_tokens": [600] * len(seconds),
        "computed_tokens": [900] * len(seconds),
        "machine": MACHINE,
        "data": DATA,
        "batch": BATCH,
        "precision": dict(FORMATS),
    }
    return Report(recipe, **defaults | values)


def make_record(slug="01_freeze_base", profile="small", **values):
    """The record of a ladder step; ``values`` replace fields of the step's report."""
    slugs = list(STEPS)
    before = slugs[slugs.index(slug) - 1] if slug != slugs[0] else None
    seconds = [second / RATIOS[slug] for second in (1.0, 1.1, 0.9) * 2]
    after = make_report(STEPS[slug], PEAKS[slug], seconds, **values)
    return Record(
        slug, profile, Comparison(after, before and make_report(STEPS[before], PEAKS[before]))
    )


def make_records(profile="small"):
    """A complete run."""
    return {slug: make_record(slug, profile) for slug in STEPS}


def make_predicted(comparison, error_bytes=0, card_change=None, card_formats=("float32",) * 2):
    """Give a comparison predictions of both its steps, for the machine and for a card.

    Args:
        error_bytes: By which the prediction for the machine is too high, all of it activations.
        card_change: MiB by which the card's peak changes; by default as the machine's does.
        card_formats: What the card stores weights in and multiplies in.
    """
    change = (comparison.peak_change_bytes or 0) // 2**20
    card_peak = 5000 + (change if card_change is None else card_change)

    def pair(of_step, before, after):
        steps = (comparison.before, before), (comparison.after, after)
        reports = [step and of_step(step.recipe, peak) for step, peak in steps]
        return Comparison(before=reports[0], after=reports[1])

    def here(recipe, peak):
        return _predicted(recipe, peak, machine=MACHINE)

    def card(recipe, peak):
        weights, autocast = card_formats
        report = _predicted(recipe, peak, machine=CARD, modelled={"seconds": 0.02})
        report.precision |= {"weights": weights, "autocast": autocast}
        report.memory.peak_reserved_bytes = (peak + 100) * 2**20
        report.fit = Fit(24 * 2**30, 2**29, 10 * 2**30, fits=True)
        return report

    both = (comparison.before, comparison.after)
    measured = [report and report.memory.peak_allocated_bytes // 2**20 for report in both]
    comparison.predicted = {"here": pair(here, *measured), "card": pair(card, 5000, card_peak)}
    memory = comparison.predicted["here"].after.memory
    memory.peak_allocated_bytes += error_bytes
    memory.by_owner["activations"] += error_bytes
    return comparison


def _predicted(recipe, peak, **values):
    return make_report(recipe, peak, (), oracle="predicted", **values)
