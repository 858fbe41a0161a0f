"""What the explorer's controls say: a recipe in a few choices, and the card it is for."""

from dataclasses import dataclass

from labkit.predict.gpus import GPUS, Gpu
from labkit.recipe import EMBEDDING_MODELS, GEOMETRIES, Recipe
from labkit.space import PRECISIONS, half_format, with_precision

MODELS = EMBEDDING_MODELS + GEOMETRIES
LARGEST_BATCH = 512
# Eight to each doubling, all multiples of 8: short lengths differ by little, long ones by much.
LENGTHS = (
    *range(16, 128, 8),
    *(
        start * eighths // 8
        for start in (128 << n for n in range(6))
        for eighths in range(8, 16)
    ),
    8192,
)
PARTS = (1, 2, 4, 8, 16, 32, 64)  # micro_batches


class SettingError(ValueError):
    """Choices that make no batch; the message says which, and what to choose."""


@dataclass(frozen=True)
class Setting:
    """One position of all controls.

    ``gpu`` is None for the CPU of this machine. Every pair is padded to ``max_length``, so the
    shape of the batch is what the controls say.

    Raises:
        SettingError: The batch has no equal parts, or the length is not one of the explorer's.
    """

    model: str = EMBEDDING_MODELS[0]
    gpu: Gpu | None = GPUS["rtx-4090"]
    batch_size: int = 32
    max_length: int = 64
    precision: str = PRECISIONS[0]
    checkpoint_every: int = 0
    micro_batches: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= LARGEST_BATCH:
            raise SettingError(
                f"batch_size must be from 1 to {LARGEST_BATCH}, not {self.batch_size}."
            )
        if self.batch_size % self.micro_batches:
            raise SettingError(
                f"{self.batch_size} pairs cannot be split into {self.micro_batches} equal "
                "parts: change batch_size or micro_batches."
            )
        if self.max_length not in LENGTHS:
            near = min(LENGTHS, key=lambda length: abs(length - self.max_length))
            raise SettingError(
                f"max_length {self.max_length} is not one of the explorer's lengths; the "
                f"nearest is {near}."
            )
        if self.precision not in PRECISIONS:
            raise SettingError(
                f"precision must be one of {', '.join(PRECISIONS)}, not {self.precision!r}."
            )

    @property
    def recipe(self) -> Recipe:
        """The recipe: that of a quick training loop, with the chosen fields."""
        recipe = Recipe(
            model=self.model,
            batch_size=self.batch_size,
            max_length=self.max_length,
            micro_batches=self.micro_batches,
            checkpoint_every=self.checkpoint_every,
            padding="max",
            cached=True,
            optimizer="adamw_fused",
        )
        half = half_format(self.gpu) if self.gpu else "bfloat16"
        return with_precision(recipe, self.precision, half)

    @property
    def place(self) -> str:
        """The card, or this machine."""
        return self.gpu.title if self.gpu else "this machine's CPU"
