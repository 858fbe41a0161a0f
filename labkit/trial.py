"""One recipe being measured: built, warmed up, its bytes recorded, its steps timed."""

import gc
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import torch

from labkit.compiling import CompilerMissing, graphs_compiled
from labkit.data import Pairs
from labkit.machine import machine_facts
from labkit.memory import measure_memory
from labkit.model_source import ModelSource, check_recipe_fits, find_model
from labkit.order import loader_options
from labkit.precision import choose_precision, product_seconds
from labkit.recipe import Recipe
from labkit.report import Report
from labkit.shapes import shape_of
from labkit.step import TrainingStep, build_step, count_layer_forwards
from labkit.tokens import Batch, batches, instruction_tokens, load_tokenizer
from labkit.trainable import check_gradients, trainable_parameters

COUNTED_PAIRS = 2  # enough to see how often a layer runs


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out: on a card, or in the CPU's allocator."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


class Trial:
    """One recipe being measured: its step, its batches, and the report they fill."""

    def __init__(
        self,
        recipe: Recipe,
        pairs: Pairs,
        device: torch.device,
        *,
        warmup_steps: int,
        timed_steps: int,
        cache_folder: Path | None,
        emulate: bool,
        progress: Callable[[str], None],
        source: ModelSource | None = None,
    ) -> None:
        self.recipe, self.device, self.progress = recipe, device, progress
        self.warmup_steps, self.timed_steps = warmup_steps, timed_steps
        self.source = source or find_model(recipe.model)
        self.precision = choose_precision(recipe, device, emulate=emulate)
        self.tokenizer = load_tokenizer(recipe.model)
        before = len(instruction_tokens(recipe, self.tokenizer))
        check_recipe_fits(self.source, recipe, len(self.tokenizer), before=before)
        self.stream = lambda: batches(
            recipe, pairs, self.tokenizer, cache_folder=cache_folder, device_type=device.type
        )
        self.step: TrainingStep | None = None
        self.calls = 0
        self.report = Report(
            recipe=recipe,
            precision=self.precision.to_dict(),
            model=self.source.facts(),
            data=pairs.facts(),
            machine=machine_facts(device.type),
        )
        self.report.notes += loader_options(recipe, device.type)[1]
        if self.precision.reason:
            self.report.notes.append(self.precision.reason)
            asked = recipe.autocast if recipe.autocast != "none" else recipe.weights
            used = self.precision.autocast or self.precision.weights
            self.report.product_seconds = product_seconds([used, getattr(torch, asked)], device)

    def attempt(self, work: Callable[[], None]) -> None:
        """Do a part of the work; running out of memory or of a compiler is a result of it."""
        if not self.report.ok:
            return
        try:
            work()
        except CompilerMissing as error:
            self.report.status, self.report.reason = "skipped", str(error)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            if self.report.memory is None:
                self.report.status, self.report.reason = "out_of_memory", reason
            else:  # its bytes were taken while it was alone
                for field in ("step_seconds", "data_seconds", "real_tokens", "computed_tokens"):
                    getattr(self.report, field).clear()
                self.report.notes.append(
                    f"not timed: out of memory beside the other recipe ({reason})"
                )
                self.release()
        if not self.report.ok:
            self.release()

    def build(self) -> None:
        """Build the step."""
        self.progress("building the model")
        self.step = build_step(
            self.recipe,
            self.source,
            self.precision,
            self.device,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        self.calls = 0
        self.report.losses = []
        self.report.trainable = trainable_parameters(self.step.model)

    def prepare(self) -> None:
        """Build the step and warm it up; compiled, on every shape that will be timed."""
        self.build()
        planned = list(islice(self.stream(), self.warmup_steps + self.timed_steps))
        probe = planned[0].split(max(1, len(planned[0].labels) // COUNTED_PAIRS))[0]
        self.report.layer_forwards = count_layer_forwards(self.step, probe.to(self.device))

        graphs, compiles = graphs_compiled(), self.recipe.compile != "none"
        for index, batch in enumerate(planned[: self.warmup_steps]):
            self.progress(f"warm-up step {index + 1}{', compiling' * compiles}")
            seconds = self._run(iter([batch]))
            if index == 0:
                first_step_seconds = seconds
                check_gradients(self.step.model)
        if compiles:
            self._see_shapes(planned)
        if compiles and self.report.compile is None:
            self.report.compile = {
                "first_step_seconds": first_step_seconds,
                "graphs": graphs_compiled() - graphs,
                "recompilations_while_timed": 0,
            }
        self.largest = max(planned, key=lambda batch: batch.computed_tokens)

    def _see_shapes(self, planned: list[Batch]) -> None:
        """Compile for every shape that will be timed, without an update: losses stay alike."""
        seen = set()
        for batch in planned:
            for part in batch.split(self.recipe.micro_batches):
                shapes = tuple(tensor.shape for tensor in part.tensors)
                if shapes not in seen:
                    seen.add(shapes)
                    self.progress(f"warming up shape {len(seen)}")
                    loss = self.step.loss(part.to(self.device), pairs=len(batch.labels))
                    self.step.scaler.scale(loss).backward()
        self.step.optimizer.zero_grad(set_to_none=True)

    def observe_memory(self) -> None:
        """Take the bytes of one warm step, on the largest batch of those that will be timed."""
        self.progress("recording allocations of one step")
        torch.manual_seed(self.recipe.seed)
        self.report.batch = shape_of(self.largest, "the largest of the timed steps").to_dict()
        self.report.memory = measure_memory(self.step, self.largest.to(self.device))

    def start_timing(self) -> None:
        """Open the stream of batches that the timed steps draw from."""
        self.timed_batches = islice(self.stream(), self.warmup_steps, None)

    def time_step(self) -> None:
        """One timed step, the making of its batch included."""
        if self.step is None:
            return
        graphs = graphs_compiled()
        self._run(self.timed_batches, timed=True)
        if self.report.compile is not None:
            self.report.compile["recompilations_while_timed"] += graphs_compiled() - graphs
        self.report.skipped_steps = self.step.skipped_steps

    def _run(self, source: Iterator[Batch], *, timed: bool = False) -> float:
        """Seconds of one step on the next batch of ``source``, from the pairs to the update."""
        torch.manual_seed(
            self.recipe.seed + self.calls
        )  # dropout does not depend on neighbours
        self.calls += 1
        start = time.perf_counter()
        batch = next(source)
        made = time.perf_counter()
        loss = self.step(batch.to(self.device))  # reading the loss waits for the device
        seconds = time.perf_counter() - start
        self.report.losses.append(loss)
        if timed:
            self.report.step_seconds.append(seconds)
            self.report.data_seconds.append(made - start)
            self.report.real_tokens.append(batch.real_tokens)
            self.report.computed_tokens.append(batch.computed_tokens)
        return seconds

    def release(self) -> None:
        """Give the step's memory back."""
        self.step = None
        gc.collect()
        if self.device.type != "cpu":
            torch.get_device_module(self.device).empty_cache()
