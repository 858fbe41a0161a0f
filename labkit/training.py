"""Fine-tuning until it gets no better: the step that is measured, called until then.

The update is ``TrainingStep``'s, and there is no other. Around it are evaluations, the best
adapter so far, and checkpoints, from which an interrupted training goes on bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from labkit.adapter import save_adapter
from labkit.checkpoint import load_trained
from labkit.data import Pairs
from labkit.history import History
from labkit.loop import Interrupted, Loop
from labkit.machine import default_device, installed_versions
from labkit.measure import usable_device
from labkit.model_source import ModelSource, check_recipe_fits, find_model
from labkit.precision import choose_precision
from labkit.quality import Answers, Scores, answer
from labkit.recipe import Recipe
from labkit.schedule import Schedule
from labkit.step import TrainingStep, build_step
from labkit.subsets import sample
from labkit.tokens import instruction_tokens, load_tokenizer

__all__ = ["Interrupted", "Schedule", "Trained", "train"]

CHECKPOINT, ADAPTER = "checkpoint.safetensors", "adapter"


@dataclass
class Trained:
    """What came out of a training.

    Attributes:
        step: The step, with the best adapter and head in its model.
        scores: Of the best adapter, on all validation pairs.
        best_step: After so many steps it was best.
        steps: Steps done.
        stopped: Why training ended, in words.
        history: A line for each step (``loss``, ``real_tokens``, ``seconds``) and for each
            evaluation (``scores``), in order.
        adapter: Its folder, None if nothing was to be written.
    """

    step: TrainingStep
    tokenizer: object
    scores: Scores
    best_step: int
    steps: int
    stopped: str
    history: list[dict]
    adapter: Path | None

    @property
    def seconds(self) -> float:
        """Of all steps and evaluations while training, those before a resumption too."""
        return sum(line.get("scores", line)["seconds"] for line in self.history)

    def answer(self, pairs: Pairs, **options) -> Answers:
        """What the best adapter says of other pairs; options as ``quality.answer``'s."""
        return answer(self.step, pairs, self.tokenizer, **options)

    def evaluate(self, pairs: Pairs, **options) -> Scores:
        """The scores of the best adapter on other pairs; options as ``quality.answer``'s."""
        return self.answer(pairs, **options).scores()


def train(
    recipe: Recipe,
    pairs: Pairs,
    validation_pairs: Pairs,
    folder: Path | None = None,
    *,
    schedule: Schedule | None = None,
    resume: bool = False,
    source: ModelSource | None = None,
    device: str | None = None,
    emulate: bool = False,
    cache_folder: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
    watch: Callable[[dict], None] = lambda line: None,
    stop: Callable[[], bool] = lambda: False,
) -> Trained:
    """Fine-tune until validation macro-F1 no longer rises, and keep what was best.

    Of two evaluations with the same macro-F1 the one with the lower loss is better: a model
    that still gives every pair the more frequent label may yet be learning.

    Args:
        folder: Gets history, checkpoint and adapter; None keeps everything in memory.
        resume: Go on from the checkpoint in ``folder``, bit for bit; it needs one.
        source: Where the model comes from; ``recipe.model`` if left out.
        device: ``cpu``, ``cuda`` or ``mps``; by default the fastest there is.
        emulate: Use number formats that the hardware only imitates.
        cache_folder: Where a recipe with ``cached`` keeps token ids.
        progress: Told what is being done.
        watch: Given each line of the history as it is written.
        stop: Asked after every step, and while evaluating, whether to end early.

    Raises:
        Interrupted: ``stop`` said so; ``folder``, if any, holds a checkpoint.
        TrainingError: A loss or logit is not finite, or what is trained is not what should be.
        CheckpointError: There is nothing to resume, or it is of something else.
        AdapterError: The best adapter holds nothing that was learned.
        ModelError, TokenizerError, CacheError, DataError: As the parts of the step say.
    """
    folder = None if folder is None else Path(folder)
    schedule, source = schedule or Schedule(), source or find_model(recipe.model)
    place, tokenizer = usable_device(device or default_device()), load_tokenizer(recipe.model)
    before = len(instruction_tokens(recipe, tokenizer))
    check_recipe_fits(source, recipe, len(tokenizer), before=before)
    precision = choose_precision(recipe, place, emulate=emulate)
    looked_at = validation_pairs
    if schedule.light:
        looked_at = sample(validation_pairs, schedule.light, recipe.seed)
    progress("building the model")
    pad = tokenizer.pad_token_id
    step = build_step(recipe, source, precision, place, pad_token_id=pad)
    loop = Loop(
        step, tokenizer, pairs, looked_at, schedule, History(folder, watch),
        checkpoint=None if folder is None else folder / CHECKPOINT,
        identity=_identity(step, source, pairs, looked_at, schedule),
        cache_folder=cache_folder, progress=progress, stop=stop,
    )  # fmt: skip
    if resume:
        loop.resume()
    else:
        loop.history.begin()
    return _finish(loop, loop.run(), validation_pairs, source, folder)


def _finish(
    loop: Loop, stopped: str, validation_pairs: Pairs, source: ModelSource, folder: Path | None
) -> Trained:
    """Put the best adapter into the model, score it on everything, and save it."""
    step, best = loop.step, loop.state.best_step
    load_trained(step, loop.best)
    lines = loop.history.lines
    evaluated = {line["step"]: line["scores"] for line in lines if "scores" in line}
    scores = Scores.from_dict(evaluated[best])
    if loop.validation_pairs is not validation_pairs:
        scores = loop.evaluate(validation_pairs)
    adapter = None
    if folder is not None:
        loop.progress("saving the adapter")
        adapter = save_adapter(step, loop.tokenizer, folder / ADAPTER, source=source)
    return Trained(step, loop.tokenizer, scores, best, loop.state.step, stopped, lines, adapter)


def _identity(
    step: TrainingStep,
    source: ModelSource,
    pairs: Pairs,
    looked_at: Pairs,
    schedule: Schedule,
) -> dict[str, str]:
    """What the state of a training depends on, by the name a reader would use."""
    facts, formats = source.facts(), step.precision.to_dict()
    hashes = {
        "the training data's sha256": pairs.sha256,
        "the validation data's sha256": looked_at.sha256,
        "the model's config sha256": facts["config_sha256"],
        "the model's weights sha256": facts["weights_sha256"],
    }
    versions = {
        name: version
        for name, version in installed_versions().items()
        if name in ("torch", "transformers", "peft")
    }
    formats = {name: formats[name] for name in ("weights", "autocast")}
    parts = (
        ("", step.recipe.to_dict()),
        ("", {name: value and value[:12] for name, value in hashes.items()}),
        ("the version of ", versions),
        ("the format of ", formats),
        ("", {"evaluate_every": schedule.evaluate_every}),
    )
    return {prefix + name: str(value) for prefix, part in parts for name, value in part.items()}
