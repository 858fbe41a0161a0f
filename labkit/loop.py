"""The loop around a step: the next batch, an update, from time to time a look at quality.

Each step has its own seed and its own place in the stream of batches. So dropout does not
depend on what ran before, and a resumed training does what an uninterrupted one does.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from labkit.checkpoint import (
    Progress,
    Tensors,
    load_checkpoint,
    save_checkpoint,
    trained_tensors,
)
from labkit.data import Pairs
from labkit.history import History
from labkit.quality import Scores, evaluate
from labkit.schedule import Schedule
from labkit.step import TrainingStep
from labkit.tokens import batches
from labkit.trainable import TrainingError, check_gradients


class Interrupted(RuntimeError):
    """Training was asked to stop and did; what it had is in a checkpoint."""


@dataclass
class Loop:
    """A training under way.

    Attributes:
        checkpoint: Its file; None keeps none.
        identity: What must be the same for going on from the checkpoint, in words by name.
        state: How far it is.
        best: The trained tensors that validated best so far.
    """

    step: TrainingStep
    tokenizer: object
    pairs: Pairs
    validation_pairs: Pairs
    schedule: Schedule
    history: History
    checkpoint: Path | None
    identity: dict[str, str]
    cache_folder: Path | None
    progress: Callable[[str], None]
    stop: Callable[[], bool]
    state: Progress = field(default_factory=Progress)
    best: Tensors = field(default_factory=dict)

    @property
    def epoch_steps(self) -> int:
        """Steps of an epoch, its last and smaller batch included."""
        return math.ceil(len(self.pairs) / self.step.recipe.batch_size)

    def resume(self) -> None:
        """Go back to the state of the checkpoint."""
        self.state, self.best = load_checkpoint(self.checkpoint, self.step, self.identity)
        self.history.go_on(self.state.history_lines)
        self.progress(f"going on after step {self.state.step:,}")

    def run(self) -> str:
        """Train until the schedule says that it is over, and return why in words.

        Raises:
            Interrupted: ``stop`` said so.
            TrainingError: A loss or logit is not finite, or a gradient is missing.
        """
        try:
            return self._run()
        except Interrupted:
            self._save()
            raise

    def _run(self) -> str:
        stream = batches(
            self.step.recipe,
            self.pairs,
            self.tokenizer,
            cache_folder=self.cache_folder,
            skip=self.state.step,
            device_type=self.step.device.type,
        )
        while True:
            done = self.state.step
            is_due = self.schedule.is_evaluation(done, self.epoch_steps)
            if is_due and self.state.evaluated_step != done:
                self._evaluate()
            if reason := self.schedule.end(self.state, self.epoch_steps):
                return reason
            self._stop_if_asked()
            self._update(stream)

    def _update(self, stream: Iterator) -> None:
        """One step."""
        start = time.perf_counter()
        torch.manual_seed(self.step.recipe.seed + self.state.step)
        batch = next(stream)
        loss = self.step(batch.to(self.step.device))
        self.state.step += 1
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss of step {self.state.step:,} is {loss}; a learning_rate below "
                f"{self.step.recipe.learning_rate:g}, or computing in float32, may help."
            )
        if self.state.step == 1:
            check_gradients(self.step.model)
        self.history.add(
            {
                "step": self.state.step,
                "loss": loss,
                "real_tokens": batch.real_tokens,
                "seconds": time.perf_counter() - start,
            }
        )
        every = self.schedule.checkpoint_steps
        if every and self.state.step % every == 0:
            self._save()

    def _evaluate(self) -> None:
        """Look how good the model is, and keep what it learned if that is the best so far."""
        scores, state = self.evaluate(self.validation_pairs), self.state
        state.evaluated_step = state.step
        if (scores.macro_f1, -scores.loss) > (state.best_macro_f1, -state.best_loss):
            self.best = trained_tensors(self.step)
            state.best_step, state.stale = state.step, 0
            state.best_macro_f1, state.best_loss = scores.macro_f1, scores.loss
        else:
            state.stale += 1
        self.history.add({"step": state.step, "scores": scores.to_dict()})
        self._save()

    def evaluate(self, pairs: Pairs) -> Scores:
        """The scores of the model as it is."""

        def observe(text: str) -> None:
            self.progress(text)
            self._stop_if_asked()

        return evaluate(
            self.step, pairs, self.tokenizer, cache_folder=self.cache_folder, progress=observe
        )

    def _stop_if_asked(self) -> None:
        if self.stop():
            raise Interrupted(f"Stopped after step {self.state.step:,}.")

    def _save(self) -> None:
        """Write the checkpoint, after the history that belongs to it."""
        if self.checkpoint is None:
            return
        self.history.sync()
        self.state.history_lines = len(self.history.lines)
        self.state.skipped_steps = self.step.skipped_steps
        save_checkpoint(self.checkpoint, self.step, self.state, self.best, self.identity)
