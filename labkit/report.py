"""What a recipe costs: plain data, the same whoever found it out.

Bytes and counts are integers, times are every raw value in seconds, and ``None`` means "not
measured": no field ever holds a zero that nobody measured.
"""

from dataclasses import asdict, dataclass, field
from math import comb
from statistics import median, quantiles

from labkit.recipe import Recipe

STATUSES = ("ok", "out_of_memory", "skipped", "error", "interrupted")
PHASES = ("before", "forward", "backward", "optimizer")
PAIRS_TO_JUDGE = 6  # the least number of coins for which 2 / 2**n is below 5 %
OWNERS = (
    "weights", "gradients", "optimizer_state", "inputs", "activations", "temporaries",
)  # fmt: skip
TIMELINE_POINTS = 400


@dataclass
class Memory:
    """Bytes of one optimizer step.

    ``by_phase`` holds the largest number of bytes alive in each phase, and what was alive
    before the step. ``by_owner`` says who holds the peak: weights (parameters and buffers),
    gradients, optimizer state, inputs (the batch), activations (made in forward and alive until
    backward), and temporaries (made and gone within one phase, what checkpointing computes
    again among them); its values add up to ``peak_allocated_bytes``. An accelerator's counters
    tell no blocks apart: there ``activations`` holds the temporaries, too.
    ``by_module`` says of each owner in which modules its share of the peak was made.
    ``state_bytes`` is what lives from step to step, by owner. ``timeline`` is (bytes alive,
    phase) after each allocation or free, thinned so that the peak stays; ``owner_timeline``
    says of each of its points what every owner holds.
    """

    peak_allocated_bytes: int
    by_phase: dict[str, int]
    by_owner: dict[str, int]
    peak_reserved_bytes: int | None = None  # CUDA's caching allocator; no such thing on a CPU
    process_bytes: int | None = None  # resident set on a CPU, the process's share of a card
    state_bytes: dict[str, int] = field(default_factory=dict)  # alive between steps, by owner
    by_module: dict[str, dict[str, int]] = field(default_factory=dict)  # predictions only
    timeline: list[tuple[int, str]] = field(default_factory=list)
    owner_timeline: dict[str, list[int]] = field(default_factory=dict)  # predictions only
    method: str = ""  # what the bytes were taken from

    def __post_init__(self) -> None:
        if type(self.peak_allocated_bytes) is not int:
            raise ValueError(f"peak_allocated_bytes is {self.peak_allocated_bytes!r}.")


@dataclass
class Fit:
    """Whether a step runs on a card that it has for itself, and with how many bytes to spare.

    ``margin_bytes`` is what the card has, less its context and the peak reserved bytes; below 0
    the step may still run, because the allocator gives back what it caches before it fails
    (``gives_back_cache``). ``fails_in`` is the step, phase and module of the first request that
    cannot be met.
    """

    capacity_bytes: int
    context_bytes: int
    margin_bytes: int
    fits: bool
    gives_back_cache: bool = False
    fails_in: str = ""


@dataclass
class Report:
    """The cost of one recipe, with everything needed to say where the figures come from."""

    recipe: Recipe | None  # None for a step that no recipe describes
    oracle: str = "measured"
    status: str = "ok"
    reason: str = ""  # why the status is not ok
    memory: Memory | None = None
    step_seconds: list[float] = field(default_factory=list)
    data_seconds: list[float] = field(default_factory=list)  # part of a step: making its batch
    real_tokens: list[int] = field(default_factory=list)  # of each timed step, without padding
    computed_tokens: list[int] = field(default_factory=list)  # of each timed step, with padding
    losses: list[float] = field(default_factory=list)  # of every step, from the first on
    skipped_steps: int = 0  # GradScaler found an infinity and did not update
    layer_forwards: float | None = None  # runs of each layer per micro-batch; 2 = recomputed
    trainable: dict[str, int] = field(default_factory=dict)  # parameters: lora, head, base
    compile: dict | None = None  # first_step_seconds, graphs, recompilations
    precision: dict[str, str] = field(default_factory=dict)
    product_seconds: dict[str, float] = field(default_factory=dict)  # why a dtype was not used
    batch: dict = field(default_factory=dict)  # the bytes' own: pairs, tokens, padded, why
    fit: Fit | None = None  # of a card that was predicted for
    modelled: dict | None = None  # seconds of a step at best, counted and not measured
    notes: list[str] = field(default_factory=list)
    model: dict = field(default_factory=dict)
    data: dict = field(default_factory=dict)
    machine: dict = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every figure was taken."""
        return self.status == "ok"

    @property
    def median_step_seconds(self) -> float | None:
        """Median of the timed steps, in seconds."""
        return median(self.step_seconds) if self.step_seconds else None

    @property
    def real_tokens_per_second(self) -> float | None:
        """Real tokens per second over the timed steps; padding is not counted."""
        if not self.step_seconds:
            return None
        return sum(self.real_tokens) / sum(self.step_seconds)

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return asdict(self) | {"recipe": self.recipe and self.recipe.to_dict()}

    @classmethod
    def from_dict(cls, values: dict) -> "Report":
        """The value that ``to_dict`` gave."""
        if values["status"] not in STATUSES:
            raise ValueError(f"status is {values['status']!r}.")
        memory = values.get("memory")
        if memory is not None:
            memory = Memory(**memory)
            memory.timeline = [(alive, phase) for alive, phase in memory.timeline]
        fit = Fit(**values["fit"]) if values.get("fit") else None
        recipe = Recipe.from_dict(values["recipe"]) if values["recipe"] else None
        return cls(**{**values, "recipe": recipe, "memory": memory, "fit": fit})


@dataclass
class Comparison:
    """A ladder step (``after``) against the step before it, from one session.

    ``before`` is ``None`` for the first step. Timed steps of the two alternate, so
    ``before.step_seconds[i]`` and ``after.step_seconds[i]`` ran next to each other.
    ``predicted`` holds the same two steps as they were predicted before they ran: for the
    machine that measured (``here``) and for a card that somebody chose (``card``).
    """

    after: Report
    before: Report | None = None
    predicted: dict[str, "Comparison"] = field(default_factory=dict)

    @property
    def speed_ratios(self) -> list[float]:
        """Of each pair of neighbouring timed steps: how many times faster ``after`` is.

        Where the two hold different pairs, as with lengths grouped, a step is as fast as it
        gets through its real tokens.
        """
        if self.before is None:
            return []
        times = zip(self.before.step_seconds, self.after.step_seconds, strict=False)
        ratios = [b / a for b, a in times]
        before, after = self.before.real_tokens, self.after.real_tokens
        if before == after or not len(before) == len(after) == len(ratios):
            return ratios
        tokens = zip(before, after, strict=True)
        return [ratio * a / b for ratio, (b, a) in zip(ratios, tokens, strict=True)]

    @property
    def speed_ratio(self) -> float | None:
        """The median of ``speed_ratios``; above 1 the step is faster than the one before."""
        return median(self.speed_ratios) if self.speed_ratios else None

    @property
    def speed_ratio_spread(self) -> tuple[float, float] | None:
        """First and third quartile of ``speed_ratios``."""
        if len(self.speed_ratios) < 2:
            return None
        first, _, third = quantiles(self.speed_ratios, n=4, method="inclusive")
        return first, third

    @property
    def speed_change_is_clear(self) -> bool | None:
        """Whether the pairs agree so far that chance is no likely cause.

        None with fewer than ``PAIRS_TO_JUDGE`` pairs: even if all agree, that is too few.

        The quartiles of a handful of pairs exclude 1 too often when nothing has changed. A
        sign test does not: of eight pairs, all must be faster, or all slower.

        Source:
            Sign test, two-sided, at 5 %: the number of pairs above 1 is binomial with 1/2.
        """
        ratios = [ratio for ratio in self.speed_ratios if ratio != 1]
        if len(self.speed_ratios) < PAIRS_TO_JUDGE:
            return None
        above = sum(ratio > 1 for ratio in ratios)
        agreeing = max(above, len(ratios) - above)
        as_extreme = sum(comb(len(ratios), k) for k in range(agreeing, len(ratios) + 1))
        return 2 * as_extreme / 2 ** len(ratios) < 0.05

    @property
    def peak_change_bytes(self) -> int | None:
        """Peak after minus peak before."""
        if self.before is None or self.before.memory is None or self.after.memory is None:
            return None
        return self.after.memory.peak_allocated_bytes - self.before.memory.peak_allocated_bytes

    @property
    def steps_until_paid(self) -> float | None:
        """Steps after which compiling has paid for itself; infinite when it never does.

        Compiling costs the first step's seconds more than an ordinary step and saves the
        difference of the two medians on each later one.
        """
        if not self.speed_ratios or not self.after.compile or self.before.compile:
            return None
        saved = self.before.median_step_seconds - self.after.median_step_seconds
        cost = self.after.compile["first_step_seconds"] - self.after.median_step_seconds
        return cost / saved if saved > 0 else float("inf")

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return {
            "after": self.after.to_dict(),
            "before": self.before.to_dict() if self.before else None,
            "predicted": {place: pair.to_dict() for place, pair in self.predicted.items()},
        }

    @classmethod
    def from_dict(cls, values: dict) -> "Comparison":
        """The value that ``to_dict`` gave."""
        before, predicted = values["before"], values.get("predicted", {})
        return cls(
            after=Report.from_dict(values["after"]),
            before=Report.from_dict(before) if before else None,
            predicted={place: cls.from_dict(pair) for place, pair in predicted.items()},
        )


def thin(timeline: list[tuple]) -> list[tuple]:
    """At most about ``TIMELINE_POINTS`` points: the lowest and the highest of each stretch.

    A point begins with its bytes; what else it holds stays with it.
    """
    stretch = max(1, 2 * len(timeline) // TIMELINE_POINTS)
    kept = set()
    for start in range(0, len(timeline), stretch):
        indices = range(start, min(start + stretch, len(timeline)))
        kept |= {min(indices, key=lambda i: timeline[i][0])}
        kept |= {max(indices, key=lambda i: timeline[i][0])}
    return [timeline[i] for i in sorted(kept)]


def format_bytes(count: int | None) -> str:
    """Bytes for people: ``1.50 GiB``, ``12.3 MiB``, ``640 B``; ``not measured`` for None."""
    if count is None:
        return "not measured"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            digits = 2 if unit == "GiB" else 1
            return f"{count / size:,.{digits}f} {unit}"
    return f"{count} B"
