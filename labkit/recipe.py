"""What is trained, and how: the one value that every part of the lab speaks.

A recipe is frozen. The course is a ladder of recipes, each one ``replace`` of the step before,
so that a difference between two neighbours has exactly one cause.
"""

import json
from dataclasses import asdict, dataclass, field, fields, replace

GEOMETRIES = ("qwen3-tiny", "qwen3-mini", "qwen3-small")
EMBEDDING_MODELS = tuple(f"Qwen/Qwen3-Embedding-{size}" for size in ("0.6B", "4B", "8B"))

LARGEST_SEED = 2**62  # torch takes 64 bits, and steps are counted on from the seed
CHOICES = {
    "weights": ("float32", "bfloat16", "float16"),
    "autocast": ("none", "bfloat16", "float16"),
    "compile": (
        "none",
        "default",
        "reduce-overhead",
        "max-autotune",
        "max-autotune-no-cudagraphs",
    ),
    "padding": ("longest", "max", "grouped", "none"),
    "attention": ("sdpa", "eager", "flash_attention_2"),
    "optimizer": ("adamw", "adamw_fused"),
}


class RecipeError(ValueError):
    """A recipe that cannot be run; the message names the field and what it may hold."""


def _field(default, text: str):
    """A dataclass field whose help text the command line shows."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what one optimizer step costs.

    Raises:
        RecipeError: A field is out of range or contradicts another one.
    """

    model: str = _field(
        "qwen3-small",
        f"Built-in geometry ({', '.join(GEOMETRIES)}), local folder, config.json, or hub id.",
    )
    batch_size: int = _field(32, "Sentence pairs per optimizer step.")
    micro_batches: int = _field(
        1, "Parts the batch is split into, one after the other (gradient accumulation)."
    )
    max_length: int = _field(64, "Tokens per pair at most; longer pairs are cut.")
    weights: str = _field("float32", "Dtype of the frozen base weights.")
    autocast: str = _field("none", "Dtype that matrix products are computed in, or none.")
    train_base: bool = _field(
        False,
        "Base parameters get gradients, which are kept and never applied.",
    )
    checkpoint_every: int = _field(
        0, "Recompute activations in backward: 0 off, 1 every layer, n every n-th layer."
    )
    compile: str = _field("none", "torch.compile mode, or none.")
    cached: bool = _field(False, "Read token ids from a cache, not tokenise inside the loop.")
    padding: str = _field(
        "longest",
        "Pad to the longest pair of the batch; to max_length: max; put pairs of similar length "
        "together and pad to the longest: grouped; lay the pairs end to end: none.",
    )
    group_window: int = _field(
        16, "Batches whose pairs are sorted by length together, where padding is grouped."
    )
    last_token_only: bool = _field(
        False,
        "Of the last layer compute what each pair's last token needs: nothing else of it is "
        "read. Needs padding none.",
    )
    instruction: str = _field("", "Text put before every pair, beside its max_length.")
    shared_prefix: bool = _field(
        False,
        "Compute the instruction once for all pairs of a batch. Needs padding none.",
    )
    num_workers: int = _field(0, "Processes that make batches ahead; 0: the training loop.")
    prefetch_factor: int = _field(2, "Batches that each worker makes ahead.")
    pin_memory: bool = _field(False, "Make batches in memory that a card reads directly.")
    threads: int = _field(0, "Threads of a CPU that compute a step; 0: as torch chooses.")
    lora_rank: int = _field(8, "Rank of the LoRA matrices.")
    lora_alpha: int = _field(16, "LoRA scale: the update is multiplied by alpha / rank.")
    lora_dropout: float = _field(0.15, "Dropout before each LoRA matrix.")
    fast_dropout: bool = _field(
        False, "Draw two of that dropout's decisions from each random number, on a CPU."
    )
    lora_targets: tuple[str, ...] = _field(
        ("q_proj", "k_proj", "v_proj"), "Names of the linear layers that get LoRA matrices."
    )
    attention: str = _field("sdpa", "Attention implementation.")
    optimizer: str = _field(
        "adamw", "AdamW as torch chooses (on a card, lists of tensors), or in one kernel."
    )
    learning_rate: float = _field(1e-4, "AdamW's learning rate.")
    seed: int = _field(0, "Seed of weights, dropout and the order of the pairs.")

    def __post_init__(self) -> None:
        for name, smallest in (
            ("batch_size", 1), ("micro_batches", 1), ("max_length", 2), ("checkpoint_every", 0),
            ("group_window", 2), ("num_workers", 0), ("prefetch_factor", 1), ("threads", 0),
            ("lora_rank", 1), ("lora_alpha", 1), ("seed", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if type(value) is not int or value < smallest:
                raise RecipeError(
                    f"{name} must be a whole number, at least {smallest}, not {value!r}."
                )
        if self.seed >= LARGEST_SEED:
            raise RecipeError(f"seed must be below {LARGEST_SEED:,}, not {self.seed}.")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise RecipeError(
                    f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}."
                )
        for name in (
            "train_base", "cached", "last_token_only", "shared_prefix", "pin_memory",
            "fast_dropout",
        ):  # fmt: skip
            if type(getattr(self, name)) is not bool:
                raise RecipeError(f"{name} must be true or false, not {getattr(self, name)}.")
        if not isinstance(self.instruction, str):
            raise RecipeError(f"instruction must be a text, not {self.instruction!r}.")
        for name in ("last_token_only", "shared_prefix"):
            if getattr(self, name) and self.padding != "none":
                raise RecipeError(
                    f"{name} needs the pairs laid end to end: set padding to none, or leave "
                    f"{name} out."
                )
        if self.padding == "none" and self.attention != "sdpa":
            raise RecipeError(
                f"attention {self.attention} is for padded batches; padding none brings its "
                "own: leave attention at sdpa."
            )
        if self.shared_prefix and not self.instruction:
            raise RecipeError(
                "shared_prefix computes the instruction once, and there is none: set "
                "instruction, or leave shared_prefix out."
            )
        if not self.model or not isinstance(self.model, str):
            raise RecipeError("model must be a geometry, a folder, a config.json or a hub id.")
        if not 0 <= self.lora_dropout < 1:
            raise RecipeError(f"lora_dropout must be in [0, 1), not {self.lora_dropout}.")
        if not 0 < self.learning_rate < 1:
            raise RecipeError(
                f"learning_rate must be between 0 and 1, not {self.learning_rate!r}."
            )
        object.__setattr__(self, "lora_targets", tuple(self.lora_targets))
        if not self.lora_targets or not all(
            isinstance(name, str) and name for name in self.lora_targets
        ):
            raise RecipeError(
                "lora_targets must name at least one linear layer, for example q_proj."
            )
        if self.micro_batches > self.batch_size:
            raise RecipeError(
                f"micro_batches ({self.micro_batches}) is larger than batch_size "
                f"({self.batch_size}): a part would hold no pair. Lower micro_batches."
            )

    def to_dict(self) -> dict:
        """The fields as JSON values."""
        return asdict(self) | {"lora_targets": list(self.lora_targets)}

    @classmethod
    def from_dict(cls, values: dict) -> "Recipe":
        """The recipe that ``to_dict`` wrote.

        Raises:
            RecipeError: A name that is no field, or a value out of range.
        """
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise RecipeError(f"unknown recipe field {', '.join(unknown)}.")
        return cls(**values)


def differences(before: Recipe, after: Recipe) -> dict[str, tuple]:
    """The fields in which two recipes differ, each with the value before and after."""
    return {
        f.name: (getattr(before, f.name), getattr(after, f.name))
        for f in fields(Recipe)
        if getattr(before, f.name) != getattr(after, f.name)
    }


def describe_change(before: Recipe | None, after: Recipe) -> str:
    """The change from one recipe to another in words, for titles and tables."""
    if before is None:
        return "the first step"
    return ", ".join(
        f"{name}: {json.dumps(old)} → {json.dumps(new)}"
        for name, (old, new) in differences(before, after).items()
    )


def command_options(recipe: Recipe, defaults: Recipe | None = None) -> list[str]:
    """The recipe as options of the command line, less what ``defaults`` says already."""
    options, known = [], defaults.to_dict() if defaults else {}
    for name, value in recipe.to_dict().items():
        flag = name.replace("_", "-")
        if name in known and known[name] == value:
            continue
        if isinstance(value, bool):
            options.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            options += [f"--{flag}", ",".join(value) if isinstance(value, list) else str(value)]
    return options


LADDER_CHANGES = {
    "01_freeze_base": {"train_base": False},
    "02_checkpointing": {"checkpoint_every": 1},
    "03_amp": {"autocast": "bfloat16"},
    "04_accumulation": {"micro_batches": 4},
    "05_compile": {"compile": "default"},
    "06_cached_data": {"cached": True},
    "07_no_padding": {"padding": "none"},
}


@dataclass(frozen=True)
class Profile:
    """Recipe defaults and repeat counts that suit one kind of machine."""

    name: str
    recipe: Recipe
    warmup_steps: int  # untimed steps before timing; they create the optimizer state
    timed_steps: int  # timed steps of each of the two recipes that are compared


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("tiny", Recipe(model="qwen3-tiny", batch_size=8, max_length=32), 1, 3),
        Profile("small", Recipe(model="qwen3-small"), 1, 8),
        Profile("0.6b", Recipe(model=EMBEDDING_MODELS[0], batch_size=128), 3, 20),
        Profile("4b", Recipe(model=EMBEDDING_MODELS[1], weights="bfloat16"), 3, 20),
    )
}


def profile_named(name: str) -> Profile:
    """The profile of that name.

    Raises:
        RecipeError: There is none.
    """
    if name not in PROFILES:
        raise RecipeError(f"profile must be one of {', '.join(PROFILES)}, not {name!r}.")
    return PROFILES[name]


def ladder(recipe: Recipe) -> dict[str, Recipe]:
    """The course: its steps by slug, each with one field changed from the step before.

    Args:
        recipe: Where the first step starts; it is set to the naive baseline from there
            (base gradients on, every pair padded to ``max_length``).
    """
    steps = {"00_baseline": replace(recipe, train_base=True, padding="max")}
    for slug, change in LADDER_CHANGES.items():
        previous = next(reversed(steps.values()))
        steps[slug] = replace(previous, **change)
    return steps
