"""transformers' Trainer and sentence-transformers' CrossEncoderTrainer, held after each step.

The real ``trainer.train()`` runs in a thread of its own. A callback holds it at the end of each
step until its next turn, so that only one contender runs at any time. accelerate's state, of
which a process has one, is exchanged with the turns.
"""

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

import torch
from peers_measure import (
    PEAK_BATCHES,
    Contender,
    PeakRecorder,
    Skipped,
    Task,
    many_graphs,
    need_bfloat16,
    need_compiler,
)

ENDLESS = 10**6  # steps; the learning rate falls to zero only at their end
INSTALL = "pip install -r requirements-dev.txt"
GROUPED = {"train_sampling_strategy": "group_by_length"}
COMPILED = {"torch_compile": True, "tf32": False}  # unsaid, compiling turns TF32 on


class Stopped(BaseException):
    """Ends ``trainer.train()`` in its thread; nothing in a trainer catches it."""


class Turns:
    """A function in a thread that runs only in its turns, each of which ends with ``wait``."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.error: BaseException | None = None
        self.stopping, self.work = False, work
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.go.acquire()
        try:
            if not self.stopping:
                self.work()
                raise RuntimeError("training ended by itself.")
        except Stopped:
            pass
        except BaseException as error:  # shown where the turn was given
            self.error = error
        self.done.release()

    def wait(self) -> None:
        """Called in the thread: end this turn and wait for the next."""
        self.done.release()
        self.go.acquire()
        if self.stopping:
            raise Stopped

    def turn(self) -> None:
        """Let the thread run until it waits.

        Raises:
            Exception: What the thread raised.
        """
        self.go.release()
        self.done.acquire()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End the thread where it waits."""
        self.stopping = True
        self.go.release()
        self.thread.join(timeout=60)


class Held(Contender):
    """A trainer that is held after each step.

    Args:
        settings: In words.
        weights: Number format of the frozen base.
        arguments: What is not the trainer's default.
    """

    def __init__(
        self, name: str, task: Task, settings: str, *, weights: str = "float32", **arguments
    ) -> None:
        super().__init__(name, task, settings)
        self.weights, self.arguments = weights, arguments
        self.compiles = "torch_compile" in arguments
        self.accelerate: list[dict] = [{}, {}, {}]
        self.replacement = None  # a batch to train on in place of the trainer's next one
        self.recorder: PeakRecorder | None = None
        self.recording = False
        self.peak_bytes: int | None = None

    def _make(self, arguments: dict):
        """The trainer; ``arguments`` are those that both kinds of trainer take."""
        raise NotImplementedError

    def _computed_tokens(self, batch: dict) -> int:
        raise NotImplementedError

    def build(self) -> None:
        """The trainer, its thread, and the largest batch of its first epoch."""
        try:
            import accelerate  # noqa: F401
        except ImportError:
            raise Skipped(f"accelerate is not installed: {INSTALL}.") from None
        if self.arguments.get("bf16"):
            need_bfloat16(self.task)
        if self.compiles:
            need_compiler()
        recipe = self.task.recipe
        arguments = {
            "output_dir": str(self.task.folder / self.name),
            "per_device_train_batch_size": recipe.batch_size,
            "learning_rate": recipe.learning_rate,
            "seed": recipe.seed,
            "max_steps": ENDLESS,
            "use_cpu": True,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        environment = dict(os.environ)
        try:
            with self._own_state(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what the libraries say to each other
                self.trainer = self._make(arguments | self.arguments)
                batches = islice(self.trainer.get_train_dataloader(), PEAK_BATCHES)
                self.largest = max(batches, key=self._computed_tokens)
        finally:
            os.environ.clear()  # a trainer that compiles says so to all that come after it
            os.environ.update(environment)
        self.trainer.add_callback(_callback(self._end_step))
        step = self.trainer.training_step
        self.trainer.training_step = lambda model, batch, *more: self._step(
            step, model, batch, *more
        )
        self.turns = Turns(self._train)

    def _train(self) -> None:
        with many_graphs():
            self.trainer.train()

    def _step(self, step: Callable, model, batch: dict, *more) -> torch.Tensor:
        """The trainer's step, on another batch and recorded if asked for."""
        if self.replacement is not None:
            batch, self.replacement = dict(self.replacement), None
        self._note(batch)
        if self.recording:
            self.recorder = PeakRecorder(
                self.trainer.model, self.trainer.optimizer, batch.values()
            )
        self.loss = step(model, batch, *more)
        return self.loss

    def _note(self, batch: dict) -> None:
        """Keep what tells real tokens from padding, to be counted after the clock stopped."""
        self.mask = batch["attention_mask"]

    def _end_step(self) -> None:
        """Called by the trainer after update and ``zero_grad``."""
        if self.recorder is not None:
            self.peak_bytes, self.recorder = self.recorder.stop(), None
        self.seen.append((self.mask, self.loss))
        self.turns.wait()

    def _advance(self) -> None:
        with self._own_state():
            self.turns.turn()

    def peak(self) -> int:
        """As the base class says; the batch takes the place of the trainer's next one."""
        for self.recording in (False, True):
            self.replacement = self.largest
            self._advance()
        self.recording = False
        return self.peak_bytes

    def close(self) -> None:
        """End the thread and drop the trainer."""
        if hasattr(self, "turns"):
            self.turns.close()
            del self.turns, self.trainer, self.largest

    @contextmanager
    def _own_state(self) -> Iterator[None]:
        """Put this trainer's state where accelerate keeps the one of a process."""
        from accelerate.state import AcceleratorState, GradientState, PartialState

        shared = [
            kind._shared_state for kind in (PartialState, AcceleratorState, GradientState)
        ]
        before = [dict(state) for state in shared]
        _fill(shared, self.accelerate)
        try:
            yield
        finally:
            self.accelerate = [dict(state) for state in shared]
            _fill(shared, before)


def _fill(shared: list[dict], contents: list[dict]) -> None:
    """Give dictionaries that others hold other contents."""
    for state, content in zip(shared, contents, strict=True):
        state.clear()
        state.update(content)


def _callback(end_step: Callable[[], None]):
    from transformers import TrainerCallback

    class EndOfStep(TrainerCallback):
        """Calls a function at the end of each step."""

        def on_step_end(self, args, state, control, **_) -> None:
            end_step()

    return EndOfStep()


class HeldTrainer(Held):
    """transformers' Trainer; pairs are tokenised before training, as its examples do."""

    def _make(self, arguments: dict):
        from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

        labels = self.task.pairs.labels
        return Trainer(
            self.task.model(self.weights),
            TrainingArguments(**arguments),
            data_collator=DataCollatorWithPadding(self.task.tokenizer),
            train_dataset=[
                {"input_ids": row, "attention_mask": [1] * len(row), "labels": label}
                for row, label in zip(self.task.rows(), labels, strict=True)
            ],
            processing_class=self.task.tokenizer,
        )

    def _computed_tokens(self, batch: dict) -> int:
        return batch["input_ids"].numel()


class HeldCrossEncoder(Held):
    """sentence-transformers' CrossEncoderTrainer, with cross entropy over two labels.

    It tokenises inside the loss, whatever the loader is told.

    Args:
        grouped: Batches of pairs that are alike in length, which its arguments have no word
            for; they take a function that makes the batches.
    """

    def __init__(self, *args, grouped: bool = False, **options) -> None:
        super().__init__(*args, **options)
        self.grouped = grouped

    def _make(self, arguments: dict):
        try:
            from datasets import Dataset
            from sentence_transformers.base.modules import Transformer
            from sentence_transformers.cross_encoder import (
                CrossEncoder,
                CrossEncoderTrainer,
                CrossEncoderTrainingArguments,
            )
            from sentence_transformers.cross_encoder.losses import CrossEntropyLoss
        except ImportError as error:
            raise Skipped(f"{error.name} is not installed: {INSTALL}.") from None

        pairs, recipe = self.task.pairs, self.task.recipe
        module = Transformer(
            str(self._folder()),
            transformer_task="sequence-classification",
            config_kwargs={"num_labels": 2},
            model_kwargs={"dtype": torch.float32, "attn_implementation": "sdpa"},
            modality_config={"text": {"method": "forward", "method_output_name": "logits"}},
            module_output_name="scores",
            processor_kwargs={"model_max_length": recipe.max_length, "padding_side": "right"},
            processing_kwargs={"text": {"return_token_type_ids": False}},
        )
        module.model = self.task.model(self.weights)
        self.encoder = CrossEncoder(modules=[module])
        self.preprocess = self.encoder.preprocess
        self.encoder.preprocess = self._preprocess
        if self.grouped:
            arguments["batch_sampler"] = self._grouped
        columns = {"sentence1": pairs.first, "sentence2": pairs.second, "label": pairs.labels}
        return CrossEncoderTrainer(
            self.encoder,
            CrossEncoderTrainingArguments(**arguments),
            train_dataset=Dataset.from_dict(columns),
            loss=CrossEntropyLoss(self.encoder),
        )

    def _folder(self):
        """The base model as files, which a CrossEncoder begins with."""
        folder = self.task.folder / "base"
        if not folder.exists():
            self.task.model().unload().save_pretrained(folder)
            self.task.tokenizer.save_pretrained(folder)
        return folder

    def _grouped(self, dataset, batch_size: int, drop_last: bool, **_):
        """The sampler that Trainer calls group_by_length, in batches."""
        from sentence_transformers.base.sampler import DefaultBatchSampler
        from transformers.trainer_pt_utils import LengthGroupedSampler

        lengths = [len(row) for row in self.task.rows()]
        sampler = LengthGroupedSampler(batch_size, lengths=lengths)
        return DefaultBatchSampler(sampler, batch_size, drop_last)

    def _preprocess(self, *args, **options):
        """The encoder's own, whose mask is kept."""
        features = self.preprocess(*args, **options)
        self.mask = features["attention_mask"]
        return features

    def _note(self, batch: dict) -> None:
        """Nothing: the texts become tokens inside the loss."""

    def _computed_tokens(self, batch: dict) -> int:
        pairs = list(zip(batch["sentence1"], batch["sentence2"], strict=True))
        return self.preprocess(pairs)["input_ids"].numel()

    def close(self) -> None:
        """End the thread and drop encoder and trainer."""
        super().close()
        self.encoder = self.preprocess = None


def trainers(task: Task) -> list[Held]:
    """The Trainer's settings that are tried."""
    half = {"weights": "bfloat16"}
    return [
        HeldTrainer("trainer_default", task, "defaults: float32, padded to the longest"),
        HeldTrainer("trainer_autocast", task, "bf16=True over float32 weights", bf16=True),
        HeldTrainer("trainer_bfloat16", task, "bfloat16 weights", **half),
        HeldTrainer(
            "trainer_grouped", task, "bfloat16 weights, grouped by length", **half, **GROUPED
        ),
        HeldTrainer(
            "trainer_workers",
            task,
            "bfloat16 weights, grouped by length, one loader process",
            **half,
            **GROUPED,
            dataloader_num_workers=1,
        ),
        HeldTrainer(
            "trainer_compiled",
            task,
            "bfloat16 weights, grouped by length, torch_compile",
            **half,
            **GROUPED,
            **COMPILED,
        ),
    ]


def cross_encoders(task: Task) -> list[Held]:
    """The CrossEncoderTrainer's settings that are tried."""
    half = {"weights": "bfloat16"}
    return [
        HeldCrossEncoder("crossencoder_default", task, "defaults: float32"),
        HeldCrossEncoder("crossencoder_autocast", task, "bf16=True", bf16=True),
        HeldCrossEncoder("crossencoder_bfloat16", task, "bfloat16 weights", **half),
        HeldCrossEncoder(
            "crossencoder_grouped",
            task,
            "bfloat16 weights, a batch sampler that groups by length",
            grouped=True,
            **half,
        ),
        HeldCrossEncoder(
            "crossencoder_compiled",
            task,
            "bfloat16 weights, grouped by length, torch_compile",
            grouped=True,
            **half,
            **COMPILED,
        ),
    ]
