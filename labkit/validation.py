"""A validation: what was predicted for each step beside what was measured, as plain data."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from labkit.records import RecordError, read_json, to_json, write_text
from labkit.reference import REFERENCE, VALIDATIONS, file_name
from labkit.report import Report

FORMAT = "labkit validation 1"
HALF = {"bfloat16", "float16"}
BOUND = 0.001  # of the peak of a step that is not compiled, on a CPU


@dataclass
class Row:
    """One step, measured and predicted; ``reason`` says why there is no prediction."""

    slug: str
    measured: Report
    predicted: Report | None = None
    reason: str = ""

    @property
    def compiled(self) -> bool:
        """Whether the step is compiled; its prediction is that of the step without."""
        return self.measured.recipe.compile != "none"

    @property
    def error_bytes(self) -> int | None:
        """Predicted peak less measured peak."""
        return self._error_bytes("peak_allocated_bytes")

    @property
    def error(self) -> float | None:
        """``error_bytes`` as a fraction of what was measured."""
        return self._error("peak_allocated_bytes")

    @property
    def reserved_error_bytes(self) -> int | None:
        """Predicted less measured bytes that the caching allocator reserves at most."""
        return self._error_bytes("peak_reserved_bytes")

    @property
    def reserved_error(self) -> float | None:
        """``reserved_error_bytes`` as a fraction of what was measured."""
        return self._error("peak_reserved_bytes")

    @property
    def seconds(self) -> float | None:
        """Median of the timed steps, without making their batches: that is not modelled."""
        report = self.measured
        steps = [
            step - data
            for step, data in zip(report.step_seconds, report.data_seconds, strict=True)
        ]
        return median(steps) if steps else None

    @property
    def modelled_seconds(self) -> float | None:
        """Seconds at best, where the card's rates are known."""
        modelled = self.predicted and self.predicted.modelled
        return modelled["seconds"] if modelled else None

    @property
    def owner_errors(self) -> dict[str, int]:
        """Predicted less measured bytes of each owner that differs, the largest first.

        A card's counters tell temporaries from activations as little as the measurement does.
        """
        if not self._both:
            return {}
        there, here = self.measured.memory.by_owner, dict(self.predicted.memory.by_owner)
        if "temporaries" not in there:
            here["activations"] += here.pop("temporaries", 0)
        errors = {name: here.get(name, 0) - there.get(name, 0) for name in {**there, **here}}
        found = [(name, error) for name, error in errors.items() if error]
        return dict(sorted(found, key=lambda item: -abs(item[1])))

    @property
    def bound(self) -> float | None:
        """The error that is allowed; None where none is.

        For products in 16 bits a CPU's library borrows memory that no trace sees: too little to
        matter, but for a tiny model.
        """
        report = self.measured
        on_cpu = report.machine.get("device") == "cpu"
        formats = {report.precision.get(name) for name in ("weights", "autocast")}
        tiny_half = report.model.get("name", "").startswith("qwen3-tiny") and formats & HALF
        return BOUND if on_cpu and not self.compiled and not tiny_half else None

    @property
    def within(self) -> bool | None:
        """Whether the error is not above the bound; None where there is no bound or error."""
        if self.bound is None or self.error is None:
            return None
        return abs(self.error) <= self.bound

    @property
    def failed(self) -> bool:
        """Whether the row is no answer: its bound is missed, or a half of it is missing."""
        return self.within is False or self.measured.status == "error" or bool(self.reason)

    @property
    def _both(self) -> bool:
        return bool(self.measured.memory and self.predicted and self.predicted.memory)

    def _error_bytes(self, name: str) -> int | None:
        if not self._both:
            return None
        there, here = getattr(self.measured.memory, name), getattr(self.predicted.memory, name)
        return None if there is None or here is None else here - there

    def _error(self, name: str) -> float | None:
        error = self._error_bytes(name)
        return None if error is None else error / getattr(self.measured.memory, name)

    def to_dict(self) -> dict:
        """Plain values for JSON, what follows from the two reports among them."""
        return {
            "slug": self.slug,
            "error_bytes": self.error_bytes,
            "error": self.error,
            "reserved_error_bytes": self.reserved_error_bytes,
            "reserved_error": self.reserved_error,
            "owner_errors": self.owner_errors,
            "seconds": self.seconds,
            "modelled_seconds": self.modelled_seconds,
            "bound": self.bound,
            "within": self.within,
            "reason": self.reason,
            "measured": self.measured.to_dict(),
            "predicted": self.predicted and self.predicted.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict) -> "Row":
        """The row that ``to_dict`` wrote."""
        predicted = values["predicted"] and Report.from_dict(values["predicted"])
        measured = Report.from_dict(values["measured"])
        return cls(values["slug"], measured, predicted, values["reason"])


@dataclass
class Validation:
    """The rows of one run, and what they were made on.

    Attributes:
        layers: Of the model; None for all that it has.
        card: The card that was predicted for, empty on a CPU, with what was seen of the one
            that is here.
    """

    profile: str
    layers: int | None
    machine: dict
    card: dict = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    created: str = field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds")
    )

    @property
    def failed(self) -> list[str]:
        """The steps whose bound is missed or of which a half is missing."""
        return [row.slug for row in self.rows if row.failed]

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        rows = [row.to_dict() for row in self.rows]
        return {"format": FORMAT} | vars(self) | {"rows": rows, "failed": self.failed}

    @classmethod
    def from_dict(cls, values: dict) -> "Validation":
        """The value that ``to_dict`` wrote."""
        if values["format"] != FORMAT:
            raise ValueError(values["format"])
        names = ("profile", "layers", "machine", "card", "created")
        rows = [Row.from_dict(row) for row in values["rows"]]
        return cls(**{name: values[name] for name in names}, rows=rows)


def save_validation(validation: Validation, folder: Path = REFERENCE) -> Path:
    """Keep a validation for its machine, without timelines and modules.

    Raises:
        RecordError: It is no result: tiny, or a step failed.
    """
    if validation.profile == "tiny" or not validation.rows:
        raise RecordError("A tiny or empty validation is not kept; use --profile small.")
    if validation.failed:
        raise RecordError(f"{', '.join(validation.failed)} failed, so nothing is kept.")
    document = validation.to_dict()
    for row in document["rows"]:
        for report in (row["measured"], row["predicted"]):
            report["machine"] = {"device": report["machine"]["device"]}
            if report["memory"]:
                report["memory"] |= {"timeline": [], "owner_timeline": {}, "by_module": {}}
    parts = [validation.machine["name"], validation.profile]
    if validation.layers:
        parts += [str(validation.layers), "layers"]
    path = folder / VALIDATIONS.replace("*", file_name(*parts))
    rows = ",\n".join(to_json(row) for row in document.pop("rows"))
    write_text(path, f'{to_json(document)[:-1]}, "rows": [\n{rows}\n]}}\n')
    return path


def load_validation(path: Path) -> Validation:
    """Read a validation that was kept.

    Raises:
        RecordError: The file is missing, damaged, or none.
    """
    try:
        return Validation.from_dict(read_json(path))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(f"{path} is no {FORMAT}. Make it anew: labkit validate") from error
