"""How long to train, and when to look how good the model is."""

from dataclasses import dataclass

from labkit.checkpoint import Progress


class ScheduleError(ValueError):
    """A schedule that makes no sense; the message names the field."""


@dataclass(frozen=True)
class Schedule:
    """How long to train, and when to look.

    Attributes:
        epochs: Passes over the training pairs at most.
        max_steps: Steps at most; None leaves it to the epochs.
        evaluate_every: Steps between evaluations; None: once an epoch.
        patience: Evaluations in a row that may bring nothing better before training stops.
        light: Evaluate on so many of the validation pairs while training; None: on all.
        checkpoint_steps: Steps between checkpoints, besides the one after each evaluation.

    Raises:
        ScheduleError: A number is below 1.
    """

    epochs: int = 10
    max_steps: int | None = None
    evaluate_every: int | None = None
    patience: int = 3
    light: int | None = None
    checkpoint_steps: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ScheduleError(f"{name} must be at least 1, not {value}.")

    def last_step(self, epoch_steps: int) -> int:
        """Steps at most, where an epoch has so many."""
        return min(self.epochs * epoch_steps, self.max_steps or self.epochs * epoch_steps)

    def is_evaluation(self, step: int, epoch_steps: int) -> bool:
        """Whether the model is to be evaluated after so many steps."""
        every = self.evaluate_every or epoch_steps
        return step > 0 and (step % every == 0 or step == self.last_step(epoch_steps))

    def end(self, progress: Progress, epoch_steps: int) -> str | None:
        """Why training is over, in words; None if it is not."""
        if progress.stale >= self.patience:
            return f"no better validation in {_plural(self.patience, 'evaluation')}"
        if progress.step < self.last_step(epoch_steps):
            return None
        if progress.step >= self.epochs * epoch_steps:
            return f"{_plural(self.epochs, 'epoch')} done"
        return f"{_plural(progress.step, 'step')} done"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count > 1)}"
