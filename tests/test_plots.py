"""Figures show the data they are given, in words and units, and never invent a zero."""

import subprocess
import sys
from dataclasses import replace

import pytest
from figures import assert_tidy, hatched_gaps, texts, title
from matplotlib import pyplot
from matplotlib.colors import to_hex

from labkit import captions
from labkit.overview import plot_ladder
from labkit.plots import plot_peaks, plot_phases, plot_step_times, plot_timeline
from labkit.recipe import Recipe, ladder
from labkit.report import OWNERS, PHASES, Comparison, Memory, Report

GIB, MIB = 2**30, 2**20
STEPS = ladder(Recipe())
PLOTS = {
    plot_phases: captions.alt_phases,
    plot_peaks: captions.alt_peaks,
    plot_step_times: captions.alt_step_times,
    plot_timeline: captions.alt_timeline,
}


def a_memory(peak: int, micro_batches: int = 1) -> Memory:
    """A plausible step: activations grow in forward and shrink in backward."""
    base = peak // 5
    passes = (["forward"] * 40 + ["backward"] * 50) * micro_batches
    timeline = []
    for index, phase in enumerate(["before"] * 2 + passes + ["optimizer"] * 8):
        place = (index - 2) % 90
        share = {"forward": place / 40, "backward": 1 - (place - 40) / 50}.get(phase, 0.02)
        temporary = 0.93 if index % 3 == 1 else 1
        timeline.append((base + int((peak - base) * share * temporary), phase))
    by_phase = {name: max(alive for alive, p in timeline if p == name) for name in PHASES}
    by_owner = {
        "weights": base * 9 // 10,
        "gradients": base // 50,
        "optimizer_state": base // 25,
        "inputs": 65_536,
        "temporaries": peak // 10,
    }
    by_owner["activations"] = peak - sum(by_owner.values())
    return Memory(peak, by_phase, by_owner, timeline=timeline)


def a_report(slug: str, peak: int, seconds: list[float]) -> Report:
    memory = a_memory(peak, STEPS[slug].micro_batches)
    return Report(STEPS[slug], memory=memory, step_seconds=seconds, machine={"name": "box"})


def missing(slug: str, status: str, reason: str) -> Report:
    return Report(STEPS[slug], status=status, reason=reason, machine={"name": "box"})


def tiny(report: Report) -> Report:
    return replace(report, recipe=replace(report.recipe, model="qwen3-tiny"))


BASELINE = a_report("00_baseline", 8 * GIB, [3.0, 3.2, 3.1])
FROZEN = a_report("01_freeze_base", 6 * GIB, [2.0, 1.6, 2.0])
OUT_OF_MEMORY = missing("01_freeze_base", "out_of_memory", "2.37 GiB asked for, 1.1 GiB free.")
ORDINARY = Comparison(FROZEN, BASELINE)
CASES = {
    "ordinary": ORDINARY,
    "first": Comparison(BASELINE),
    "after missing": Comparison(OUT_OF_MEMORY, BASELINE),
    "before missing": Comparison(BASELINE, OUT_OF_MEMORY),
    "both missing": Comparison(OUT_OF_MEMORY, missing("00_baseline", "skipped", "")),
    "one pair": Comparison(
        replace(FROZEN, step_seconds=[0.02]), replace(BASELINE, step_seconds=[0.03])
    ),
    "same recipe": Comparison(BASELINE, BASELINE),
    "huge and small": Comparison(a_report("01_freeze_base", 7 * MIB, [1e-3]), BASELINE),
}


@pytest.fixture(autouse=True)
def no_figure_left_open():
    yield
    left_open = pyplot.get_fignums()
    pyplot.close("all")
    assert left_open == []


def bar_heights(ax) -> list[list[float]]:
    return [[bar.get_height() for bar in bars] for bars in ax.containers]


@pytest.mark.parametrize("plot", PLOTS)
@pytest.mark.parametrize("case", ["ordinary", "first", "before missing", "both missing"])
def test_nothing_overlaps_or_leaves_the_figure(plot, case):
    assert_tidy(plot(CASES[case]).figure)


@pytest.mark.parametrize("plot", PLOTS)
def test_draws_into_the_axes_it_is_given(plot):
    figure, ax = pyplot.subplots()
    assert plot(ORDINARY, ax) is ax
    pyplot.close(figure)


@pytest.mark.parametrize("plot", PLOTS)
def test_the_title_says_which_oracle_and_machine(plot):
    assert title(plot(ORDINARY)).endswith("measured on box, qwen3-small")
    predicted = Comparison(replace(FROZEN, oracle="predicted", machine={"name": "A100"}))
    assert title(plot(predicted)).endswith("predicted for A100, qwen3-small")


@pytest.mark.parametrize("plot", PLOTS)
def test_a_tiny_run_is_labelled_in_figure_and_text(plot):
    comparison = Comparison(tiny(FROZEN), tiny(BASELINE))
    assert title(plot(comparison)).endswith("(tiny: not a result)")
    assert "(tiny: not a result)" in PLOTS[plot](comparison)


@pytest.mark.parametrize("plot", PLOTS)
def test_what_was_not_measured_is_a_hatched_gap_with_the_reason(plot):
    ax = plot(CASES["after missing"])
    everything = " ".join(texts(each) for each in ax.figure.axes)
    assert any(hatched_gaps(each) for each in ax.figure.axes)
    assert "out of memory: 2.37 GiB asked for, 1.1 GiB free" in everything
    assert not any(0 in heights for heights in bar_heights(ax))
    alt = PLOTS[plot](CASES["after missing"])
    assert "This step (train_base=False): out of memory: 2.37 GiB asked for" in alt


@pytest.mark.parametrize("plot", PLOTS)
def test_the_first_step_is_one_series_without_gap(plot):
    ax = plot(CASES["first"])
    everything = " ".join(texts(each) for each in ax.figure.axes)
    assert "this step" in everything
    assert "previous" not in everything
    assert not any(hatched_gaps(each) for each in ax.figure.axes)
    assert "Previous step" not in PLOTS[plot](CASES["first"])


def test_phase_bars_are_the_bytes_of_each_phase():
    ax = plot_phases(ORDINARY)
    assert bar_heights(ax) == [
        list(BASELINE.memory.by_phase.values()),
        list(FROZEN.memory.by_phase.values()),
    ]
    assert ax.get_ylim()[0] == 0
    assert "before the step forward backward optimizer" in texts(ax)
    assert "previous step (train_base=True) this step (train_base=False)" in texts(ax)


def test_a_phase_without_bytes_is_a_gap():
    memory = replace(BASELINE.memory, by_phase={"forward": GIB, "backward": 2 * GIB})
    ax = plot_phases(Comparison(replace(BASELINE, memory=memory)))
    assert bar_heights(ax) == [[GIB, 2 * GIB]]
    assert [round(gap.get_x() + gap.get_width() / 2) for gap in hatched_gaps(ax)] == [0, 3]


def test_series_differ_by_hatch_as_well_as_by_colour():
    previous, this = (bars[0] for bars in plot_phases(ORDINARY).containers)
    assert previous.get_hatch() != this.get_hatch()
    assert to_hex(previous.get_facecolor()) != to_hex(this.get_facecolor())


@pytest.mark.parametrize(("peak", "unit"), [(3 * GIB, "GiB"), (300 * MIB, "MiB")])
def test_the_unit_follows_the_data_and_ticks_are_round_in_it(peak, unit):
    ax = plot_phases(Comparison(a_report("00_baseline", peak, [1.0])))
    assert ax.get_ylabel() == f"Peak bytes alive ({unit})"
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[0] == "0"
    assert all(len(label) <= 4 for label in labels)


def test_peaks_are_stacked_by_owner_up_to_the_total():
    ax = plot_peaks(ORDINARY)
    heights = [height for (height,) in bar_heights(ax)]
    owners = [memory.by_owner[o] for memory in (BASELINE.memory, FROZEN.memory) for o in OWNERS]
    assert heights == owners
    last = ax.containers[-1][0]
    assert last.get_y() + last.get_height() == 6 * GIB
    assert "8.00 GiB" in texts(ax)
    assert "6.00 GiB" in texts(ax)
    assert "inputs 64.0 KiB → 64.0 KiB" in texts(ax)
    assert "2.00 GiB less than the previous step (−25.0\u00a0%)" in ax.get_title(loc="left")
    assert len({bars[0].get_hatch() for bars in ax.containers}) == len(OWNERS)


def test_every_timed_step_is_a_point_and_each_median_a_line():
    ax = plot_step_times(ORDINARY)
    medians = [list(line.get_ydata()) for line in ax.lines if len(line.get_xdata()) == 2]
    points = [list(line.get_ydata()) for line in ax.lines if len(line.get_xdata()) == 3]
    assert points == [BASELINE.step_seconds, FROZEN.step_seconds]
    assert medians == [[3.1, 3.1], [2.0, 2.0]]
    assert ax.get_ylabel() == "Time of one step (s)"
    assert "1.55 times as fast as the previous step (quartiles 1.52 to 1.77)" in title(ax)


def test_neighbouring_steps_of_the_two_recipes_stand_side_by_side():
    previous, this = (line for line in plot_step_times(ORDINARY).lines if line.get_marker())
    pairs = zip(previous.get_xdata(), this.get_xdata(), strict=True)
    places = [place for pair in pairs for place in pair]
    assert places == sorted(places)
    assert plot_step_times(ORDINARY).get_xlabel() == "Pair of timed steps, in the order run"
    assert plot_step_times(CASES["first"]).get_xlabel() == "Timed step, in the order run"


def test_one_pair_of_steps_has_a_ratio_without_quartiles():
    ax = plot_step_times(CASES["one pair"])
    assert "1.50 times as fast as the previous step (one pair, no quartiles)" in title(ax)
    assert ax.get_ylabel() == "Time of one step (ms)"
    assert "one step of 20.0 ms" in captions.alt_step_times(CASES["one pair"])


def test_the_timeline_holds_every_recorded_value_and_its_phases():
    accumulating = a_report("04_accumulation", 2 * GIB, [1.0])
    ax = plot_timeline(Comparison(accumulating))
    (line,) = ax.lines
    assert list(line.get_ydata()) == [alive for alive, _ in accumulating.memory.timeline]
    strip = ax.figure.axes[-1]
    passes = ["//", "\\\\"] * 4
    assert [bar.get_hatch() for bar in strip.patches] == ["", *passes, ".."]
    assert strip.get_xlabel().endswith("(%)")
    assert "before the step forward backward optimizer" in texts(ax)
    assert "this step: peak 2.00 GiB, backward" in texts(strip)


def test_a_memory_without_timeline_is_a_gap():
    memory = replace(FROZEN.memory, timeline=[], method="peak counters of CUDA")
    report = replace(FROZEN, memory=memory)
    ax = plot_timeline(Comparison(report))
    assert hatched_gaps(ax.figure.axes[-1])
    assert not ax.lines
    reason = "this step: no timeline, bytes come from peak counters of CUDA"
    assert reason in texts(ax.figure.axes[-1])
    assert reason in captions.alt_timeline(Comparison(report)).replace("This", "this")


def a_ladder() -> dict[str, Comparison]:
    skipped = missing("05_compile", "skipped", "no C++ compiler")
    accumulated = a_report("04_accumulation", 2 * GIB, [4.0, 4.4])
    cached = a_report("06_cached_data", 1 * GIB, [2.0, 2.0])
    return {
        "00_baseline": Comparison(BASELINE),
        "01_freeze_base": ORDINARY,
        "04_accumulation": Comparison(accumulated, FROZEN),
        "05_compile": Comparison(skipped, accumulated),
        "06_cached_data": Comparison(cached, skipped),
    }


def test_the_ladder_has_a_bar_and_a_ratio_for_what_was_measured_only():
    peaks, speeds = plot_ladder(a_ladder())
    bars = [(bar.get_y() + 0.3, bar.get_width()) for (bar,) in peaks.containers]
    assert bars == [(0, 8 * GIB), (1, 6 * GIB), (2, 2 * GIB), (4, 1 * GIB)]
    assert len(hatched_gaps(peaks)) == 1
    assert "skipped: no C++ compiler" in texts(peaks)
    assert [label.get_text() for label in peaks.get_yticklabels()] == list(a_ladder())
    assert peaks.get_xlabel() == "Peak bytes alive (GiB)"

    points = [container.lines[0].get_xydata().tolist() for container in speeds.containers]
    assert points == [[[pytest.approx(1.55), 1]], [[pytest.approx(0.4318, abs=1e-4), 2]]]
    assert "no ratio, this step skipped" in texts(speeds)
    assert "no ratio, previous step skipped" in texts(speeds)
    assert len(hatched_gaps(speeds)) == 2


def test_nothing_in_the_ladder_overlaps_or_leaves_the_figure():
    assert_tidy(plot_ladder(a_ladder())[0].figure)


def test_the_error_bar_of_a_ratio_spans_its_quartiles():
    _, speeds = plot_ladder({"01_freeze_base": ORDINARY})
    (segment,) = speeds.containers[0].lines[2][0].get_segments()
    assert segment[:, 0].tolist() == pytest.approx(ORDINARY.speed_ratio_spread)


def test_the_ladder_draws_into_the_axes_it_is_given():
    figure, axes = pyplot.subplots(1, 2)
    assert plot_ladder(a_ladder(), axes) == tuple(axes)
    pyplot.close(figure)


def test_the_ladder_text_names_every_step():
    alt = captions.alt_ladder(a_ladder())
    assert "00_baseline: peak 8.00 GiB; first step, nothing to compare with." in alt
    assert "01_freeze_base: peak 6.00 GiB; 1.55 times as fast as the previous step" in alt
    assert "05_compile: skipped: no C++ compiler; no ratio, this step skipped." in alt


def test_alternative_texts_hold_the_values():
    phases = captions.alt_phases(ORDINARY)
    assert "measured on box, qwen3-small" in phases
    assert "Previous step (train_base=True): before the step 1.73 GiB" in phases
    assert "backward 6.00 GiB" in phases
    assert "2.00 GiB less than the previous step" in captions.alt_peaks(ORDINARY)
    assert "peak 6.00 GiB, of it weights 1.08 GiB" in captions.alt_peaks(ORDINARY)
    assert "3 steps of 1.60 s to 2.00 s, median 2.00 s" in captions.alt_step_times(ORDINARY)
    assert "peaks at 8.00 GiB (backward)" in captions.alt_timeline(ORDINARY)


def test_a_change_of_nothing_is_said_to_be_none():
    assert captions.peak_words(CASES["same recipe"]) == (
        "the same as the previous step, to the byte"
    )


def test_provenance_names_each_source_once():
    elsewhere = replace(FROZEN, oracle="predicted", machine={})
    assert captions.provenance(BASELINE, FROZEN, elsewhere) == (
        "measured on box, qwen3-small; predicted for an unnamed machine, qwen3-small"
    )


def test_a_long_reason_is_shortened():
    words = captions.why_missing(missing("00_baseline", "error", "line one\nline two " * 40))
    assert words.startswith("failed: line one line two line one")
    assert len(words) < 220


def test_importing_needs_no_pyplot_and_changes_no_setting():
    code = (
        "import sys, matplotlib; before = matplotlib.rcParams.copy()\n"
        "import labkit.plots, labkit.overview\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert repr(before) == repr(matplotlib.rcParams.copy())"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
