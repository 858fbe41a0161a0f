"""Records as a run leaves them, made without measuring anything."""

from labkit.recipe import PROFILES, ladder
from labkit.records import Record
from labkit.report import OWNERS, PHASES, Comparison, Memory, Report

STEPS = ladder(PROFILES["small"].recipe)
PEAKS = dict(zip(STEPS, (4000, 3000, 1500, 1500, 800, 900, 900), strict=True))
RATIOS = dict(zip(STEPS, (1, 1.25, 0.8, 2, 1, 1.5, 1.1), strict=True))
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
