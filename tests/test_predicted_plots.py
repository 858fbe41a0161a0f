"""Figures and rows of one predicted step show the report they are given."""

from dataclasses import replace
from itertools import pairwise

import pytest
from figures import assert_tidy, hatched_gaps, texts, title
from matplotlib.figure import Figure
from samples import make_report

from labkit import captions
from labkit.canvas import OWNER_STYLES
from labkit.predicted_plots import plot_owner_timeline, plot_prediction, plot_waterfall
from labkit.recipe import Recipe
from labkit.report import OWNERS, Fit, Memory, Report
from labkit.waterfall import MODULES_SHOWN, NAME_LENGTH, waterfall

GIB, MIB = 2**30, 2**20
PLOTS = {
    plot_owner_timeline: captions.alt_owner_timeline,
    plot_waterfall: captions.alt_waterfall,
}


def a_memory() -> Memory:
    """Weights stay, activations grow and shrink, temporaries come in every second moment."""
    phases = ["before"] * 4 + ["forward"] * 20 + ["backward"] * 20 + ["optimizer"] * 4
    curves = {owner: [0] * 48 for owner in OWNERS}
    curves["weights"] = [2 * GIB] * 48
    curves["inputs"] = [MIB] * 48
    curves["activations"] = [GIB * max(0, min(i - 4, 44 - i)) // 10 for i in range(48)]
    curves["temporaries"] = [GIB // 4 * (i % 2 == 1) for i in range(48)]
    totals = [sum(values) for values in zip(*curves.values(), strict=True)]
    peak = totals.index(max(totals))
    modules = {f"model.layers.*.part_{i}": 60 * MIB for i in range(10)}
    rest = curves["activations"][peak] - sum(modules.values())
    return Memory(
        totals[peak],
        by_phase={},
        by_owner={owner: curve[peak] for owner, curve in curves.items()},
        peak_reserved_bytes=5 * GIB,
        by_module={
            "weights": {"model.embed_tokens": GIB, "model.layers.*.mlp": GIB},
            "inputs": {"": MIB},
            "activations": modules | {"": rest},
            "temporaries": {"a.very.long.path.of.modules.in.modules.layers.*.mlp": GIB // 4},
        },
        timeline=list(zip(totals, phases, strict=True)),
        owner_timeline=curves,
    )


def a_prediction(room: int = 6 * GIB, **values) -> Report:
    margin = room - 5 * GIB
    fit = Fit(room + GIB // 2, GIB // 2, margin, margin >= 0, fails_in="step 2, backward")
    return Report(
        Recipe(),
        oracle="predicted",
        machine={"name": "A100"},
        **{"memory": a_memory(), "fit": fit} | values,
    )


FITS = a_prediction()
CASES = {
    "fits": FITS,
    "does not fit": a_prediction(room=4 * GIB),
    "far below": a_prediction(room=80 * GIB),
    "no card": a_prediction(memory=replace(a_memory(), peak_reserved_bytes=None), fit=None),
    "measured": make_report(Recipe()),
    "missing": make_report(Recipe(), memory=None, status="skipped", reason="no reason"),
}


@pytest.mark.parametrize("plot", PLOTS)
@pytest.mark.parametrize("case", CASES)
def test_nothing_overlaps_or_leaves_the_figure(plot, case):
    assert_tidy(plot(CASES[case]).figure)


@pytest.mark.parametrize("plot", PLOTS)
def test_draws_into_the_axes_it_is_given(plot):
    ax = Figure().subplots()
    assert plot(FITS, ax) is ax


@pytest.mark.parametrize("plot", PLOTS)
def test_figure_and_text_say_that_it_is_predicted_and_for_what(plot):
    assert title(plot(FITS)).endswith("predicted for A100, qwen3-small")
    assert "predicted for A100, qwen3-small" in PLOTS[plot](FITS)
    tiny = replace(FITS, recipe=Recipe(model="qwen3-tiny"))
    assert title(plot(tiny)).endswith("(tiny: not a result)")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("fits", "fits, 1.00 GiB to spare"),
        ("does not fit", "does not fit, 1.00 GiB too little; first fails in step 2, backward"),
        ("no card", "no verdict without a card"),
        ("missing", "skipped: no reason"),
    ],
)
def test_the_verdict_is_in_title_and_text(case, words):
    assert words in title(plot_owner_timeline(CASES[case]))
    assert words in captions.alt_owner_timeline(CASES[case])


def test_a_fit_that_needs_the_cache_says_so():
    fit = replace(CASES["does not fit"].fit, fits=True, gives_back_cache=True)
    words = captions.verdict_words(replace(FITS, fit=fit))
    assert words.startswith("fits, but only by giving back cached memory: 1.00 GiB less")


def test_owners_are_stacked_up_to_the_timeline():
    ax = plot_owner_timeline(FITS)
    tops = [area.get_paths()[0].get_extents().y1 for area in ax.collections[: len(OWNERS)]]
    assert tops == sorted(tops)
    assert tops[-1] == FITS.memory.peak_allocated_bytes
    outline, *_ = ax.lines
    held = [alive for alive, _ in FITS.memory.timeline]
    assert list(outline.get_ydata()) == [*held, held[-1]]
    assert {area.get_hatch() for area in ax.collections[: len(OWNERS)]} == {
        style["hatch"] for style in OWNER_STYLES.values()
    }


def test_the_peak_is_marked_and_named():
    ax = plot_owner_timeline(FITS)
    (mark,) = (line for line in ax.lines if line.get_marker() == "D")
    assert mark.get_ydata() == [FITS.memory.peak_allocated_bytes]
    assert "peak 4.15 GiB, forward" in texts(ax)


@pytest.mark.parametrize(("case", "lines"), [("fits", 2), ("does not fit", 2), ("no card", 0)])
def test_lines_are_drawn_at_what_is_reserved_and_at_the_room(case, lines):
    ax = plot_owner_timeline(CASES[case])
    flat = [line.get_ydata()[0] for line in ax.lines if len(line.get_ydata()) == 2]
    fit = CASES[case].fit
    assert flat == ([5 * GIB, fit.capacity_bytes - fit.context_bytes] if fit else [])
    assert len(flat) == lines


def test_a_room_far_above_is_said_and_not_drawn():
    ax = plot_owner_timeline(CASES["far below"])
    assert ax.get_ylim()[1] < 7 * GIB
    assert "room on the card 80.00 GiB, far above" in texts(ax.figure.axes[-1])


def test_the_strip_shows_the_phases():
    strip = plot_owner_timeline(FITS).figure.axes[-1]
    assert [bar.get_hatch() for bar in strip.patches] == ["", "//", "\\\\", ".."]
    assert "before the step forward backward optimizer" in texts(strip)


@pytest.mark.parametrize("case", ["measured", "missing"])
def test_a_report_without_owners_over_time_is_a_gap(case):
    ax = plot_owner_timeline(CASES[case])
    assert hatched_gaps(ax.figure.axes[-1])
    assert not ax.collections


def test_rows_of_the_waterfall_add_up():
    rows = waterfall(FITS.memory)
    owners = [row for row in rows if row.is_owner]
    assert sum(row.held_bytes for row in owners) == FITS.memory.peak_allocated_bytes
    assert [row.owner for row in owners] == ["weights", "activations", "temporaries", "inputs"]
    for before, after in pairwise(owners):
        assert after.start_bytes == before.start_bytes + before.held_bytes
    for owner in owners:
        parts = [row for row in rows if row.owner == owner.owner and not row.is_owner]
        assert not parts or parts[0].start_bytes == owner.start_bytes
        assert sum(row.held_bytes for row in parts) in (0, owner.held_bytes)


def test_the_waterfall_names_what_is_large_and_sums_up_the_rest():
    rows = {row.name: row for row in waterfall(FITS.memory)}
    assert sum(row.owner == "activations" for row in rows.values()) == 1 + MODULES_SHOWN + 1
    assert rows["5 more"].held_bytes == 5 * 60 * MIB
    assert rows["outside of any module"].owner == "activations"
    assert rows["inputs"].share_words == "<0.1%"
    (shortened,) = (name for name in rows if name.startswith("…"))
    assert shortened.endswith(".modules.layers.*.mlp")
    assert len(shortened) == NAME_LENGTH


def test_modules_below_a_percent_are_not_named():
    memory = replace(FITS.memory, by_module={"weights": {"a": 2 * GIB - 2, "b": 1, "c": 1}})
    assert [row.name for row in waterfall(memory)][:3] == ["weights", "a", "2 more"]
    memory.by_module = {"activations": {"a": 1, "b": 1}}
    assert all(row.is_owner for row in waterfall(memory))


def test_bars_of_the_waterfall_are_its_rows():
    ax, rows = plot_waterfall(FITS), waterfall(FITS.memory)
    bars = [(bar.get_x(), bar.get_width()) for (bar,) in ax.containers]
    assert bars == [(row.start_bytes, row.held_bytes) for row in rows]
    assert [label.get_text() for label in ax.get_yticklabels()] == [row.name for row in rows]
    assert "2.00 GiB, 48.2%" in texts(ax)
    assert ax.get_xlabel() == "Bytes held at the peak (GiB)"
    assert "Weights 2.00 GiB (48.2%), model.embed_tokens 1.00" in captions.alt_waterfall(FITS)


def test_both_figures_fit_into_one():
    figure = plot_prediction(FITS)
    assert len(figure.axes) == 3
    assert_tidy(figure)
