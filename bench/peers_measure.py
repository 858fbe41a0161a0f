"""What all contenders of ``peers.py`` share: the task, slices of steps, peaks, the limit."""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from labkit.compiling import CompilerMissing, compile_model, graphs_compiled
from labkit.data import Pairs
from labkit.memory import _cpu_events, replay
from labkit.model import build_model
from labkit.model_source import ModelSource, find_model
from labkit.precision import choose_precision, has_native
from labkit.recipe import Recipe
from labkit.tokenizer import encode, load_tokenizer

CPU = torch.device("cpu")
PEAK_BATCHES = 100  # of the first epoch, among which the largest is looked for: all by default
LEAST_WARM_STEPS, MOST_WARM_STEPS = 2, 12
QUIET_STEPS = 2  # in a row that compile nothing, before a compiled contender is timed
RECOMPILE_LIMIT = 64  # of a function; contenders compile the same ones
SQUARE = 2048  # the large product that is tried beside the model's own sizes
PRODUCT_RUNS = 8


class Skipped(Exception):
    """A contender that cannot run here; the message is the sentence that says why."""


@dataclass(frozen=True)
class Task:
    """What is the same for all: model and its first state, LoRA, pairs, batch, learning rate.

    Attributes:
        recipe: Only what is the same is read from it: model, batch size, length, LoRA,
            learning rate and seed.
        folder: Where contenders keep caches and models while the bench runs.
    """

    recipe: Recipe
    pairs: Pairs
    folder: Path
    emulate: bool = False

    @cached_property
    def source(self) -> ModelSource:
        """Where the model comes from."""
        return find_model(self.recipe.model)

    @cached_property
    def tokenizer(self):
        """The model's tokenizer, told to pad right as labkit does."""
        tokenizer = load_tokenizer(self.recipe.model)
        tokenizer.padding_side = "right"
        return tokenizer

    def with_shared(self, recipe: Recipe) -> Recipe:
        """The recipe with everything in it that is the same for all."""
        shared = (
            "model", "batch_size", "max_length", "lora_rank", "lora_alpha", "lora_dropout",
            "lora_targets", "learning_rate", "seed",
        )  # fmt: skip
        return replace(recipe, **{name: getattr(self.recipe, name) for name in shared})

    def model(self, weights: str = "float32", attention: str = "sdpa") -> nn.Module:
        """A model in the state that all begin with.

        Raises:
            Skipped: The processor only imitates the format of the weights.
        """
        recipe = replace(self.recipe, weights=weights, attention=attention)
        precision = choose_precision(recipe, CPU, emulate=self.emulate)
        if precision.reason:
            raise Skipped(f"{precision.reason}.")
        pad = self.tokenizer.pad_token_id
        return build_model(recipe, self.source, precision, pad_token_id=pad)

    def rows(self, max_length: int | None = None) -> list[list[int]]:
        """Token ids of all pairs."""
        length = max_length or self.recipe.max_length
        return encode(self.tokenizer, self.pairs.first, self.pairs.second, length)


def need_bfloat16(task: Task) -> None:
    """Skip a contender whose products are in bfloat16 where that is slow for no good reason."""
    if not (task.emulate or has_native(torch.bfloat16, CPU)):
        raise Skipped("this processor has no instructions for bfloat16.")


def need_compiler() -> None:
    """Skip a contender that compiles where there is nothing to compile with."""
    try:
        compile_model(nn.Identity(), Recipe(compile="default"), CPU)
    except CompilerMissing as error:
        raise Skipped(f"{error}.") from None


def many_graphs():
    """While this context lasts, in this thread, no contender uses up another one's graphs."""
    return torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT)


@dataclass
class Slice:
    """Some steps of a contender in a row, from reading the pairs to the update."""

    seconds: float = 0.0
    steps: int = 0
    real_tokens: int = 0  # without padding
    computed_tokens: int = 0  # with padding
    graphs: int = 0  # compiled meanwhile; above 0 the seconds are not those of a warm step
    losses: list[float] = field(default_factory=list)


class Contender:
    """One way to train the task, which can be asked for some steps at a time.

    A subclass has an endless stream of batches of its own, in its own order, and ``_advance``
    takes a step on the next one. ``seen`` collects of each step what is looked at after the
    clock has stopped: how many tokens there were, and the loss.
    """

    compiles = False

    def __init__(
        self, name: str, task: Task, settings: str, repairs: Iterable[str] = ()
    ) -> None:
        self.name, self.task, self.settings = name, task, settings
        self.repairs = list(repairs)
        self.seen: list[tuple] = []  # (attention mask or (real, computed) tokens, loss)

    @property
    def family(self) -> str:
        """Who it is a setting of."""
        return self.name.partition("_")[0]

    def build(self) -> None:
        """Make model, optimizer and data; not timed."""
        raise NotImplementedError

    def peak(self) -> int:
        """Bytes of a warm step on the largest batch of the contender's first epoch."""
        raise NotImplementedError

    def close(self) -> None:
        """Give memory and threads back."""

    def _advance(self) -> None:
        raise NotImplementedError

    def run(self, steps: int) -> Slice:
        """Some steps, and what they took."""
        self.seen.clear()
        graphs, start = graphs_compiled(), time.perf_counter()
        for _ in range(steps):
            self._advance()
        seconds = time.perf_counter() - start
        tokens, losses = zip(*self.seen, strict=True)
        counted = [count_tokens(what) for what in tokens]
        return Slice(
            seconds=seconds,
            steps=steps,
            real_tokens=sum(real for real, _ in counted),
            computed_tokens=sum(computed for _, computed in counted),
            graphs=graphs_compiled() - graphs,
            losses=[float(loss) for loss in losses],
        )

    def warm_up(self) -> Slice:
        """Steps until nothing new is compiled; their sum."""
        total, quiet = Slice(), 0
        while total.steps < LEAST_WARM_STEPS or (self.compiles and quiet < QUIET_STEPS):
            if total.steps == MOST_WARM_STEPS:
                break
            part = self.run(1)
            quiet = 0 if part.graphs else quiet + 1
            for name, value in asdict(part).items():
                setattr(total, name, getattr(total, name) + value)
        return total


def count_tokens(what) -> tuple[int, int]:
    """Real and computed tokens of a step, from the masks of its parts or counted already."""
    if isinstance(what, tuple):
        return what
    masks = what if isinstance(what, list) else [what]
    return sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)


class PeakRecorder:
    """Records every allocation and free of PyTorch's CPU allocator from now until ``stop``.

    What was alive before is counted by storage: parameters and buffers, the optimizer's state,
    gradients, and the batch. A batch that a loader has made ahead is not, whoever made it.
    """

    def __init__(self, model: nn.Module, optimizer, batch: Iterable) -> None:
        optimizer_state = [v for state in optimizer.state.values() for v in state.values()]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        tensors = [*model.parameters(), *model.buffers(), *optimizer_state, *gradients, *batch]
        self.state = {
            storage.data_ptr(): ("weights", storage.nbytes())
            for storage in (t.untyped_storage() for t in tensors if torch.is_tensor(t))
            if storage.nbytes()
        }
        self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.profiler.start()

    def stop(self) -> int:
        """The peak in bytes.

        Raises:
            RuntimeError: The recorder saw no allocation.
        """
        self.profiler.stop()
        events = _cpu_events(self.profiler)
        if not events:
            raise RuntimeError("the profiler reported no allocation: nothing was measured.")
        return replay(events, self.state, gradients=set()).peak_allocated_bytes


def useful_flops_per_token(task: Task) -> float:
    """Floating point operations that a step needs for a real token, counted on a real batch.

    Each pair of the first batch is run alone, so that no product has a row of padding and no
    text attends to another one: what the pairs laid end to end need. ``FlopCounterMode`` adds
    up the products that forward and backward then really ask for:

    - A frozen linear layer of ``m`` × ``n``: 2mn forward, 2mn for the gradient of its input.
      Its weights get no gradient. What lies before the first LoRA matrix gets none either.
    - A LoRA pair of rank ``r`` on it: 2r(m + n) forward, twice that backward.
    - Attention of a pair of ``T`` tokens, ``h`` heads of size ``d``: 4Thd a token forward,
      twice that backward. The half that the causal mask hides is counted: it is small here.
    - The head, on the last token of each pair.

    Recomputing is not useful by this count, nor is padding. A step that leaves out of the last
    layer what nothing reads does less than this, and is credited with all of it.
    """
    model = task.model(attention="eager").train()  # the fused kernel of a CPU is not counted
    rows = task.rows()[: task.recipe.batch_size]
    with FlopCounterMode(display=False) as counter:
        for row, label in zip(rows, task.pairs.labels, strict=False):
            ids = torch.tensor([row])
            model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                labels=torch.tensor([label]),
            ).loss.backward()
    return counter.get_total_flops() / sum(len(row) for row in rows)


def matrix_rates(task: Task) -> dict[str, dict]:
    """The highest rate of matrix products here, by number format, and the product that had it.

    Tried are the sizes of the model's own linear layers, with as many rows as a batch has real
    tokens, and a large square. The rate is that of the fastest of several runs.
    """
    with torch.device("meta"):
        model = task.model()
    sizes = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear)}
    rows = sum(len(row) for row in task.rows()[: task.recipe.batch_size])
    shapes = [(rows, inner, outer) for outer, inner in sorted(sizes) if min(inner, outer) > 64]
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        if not has_native(dtype, CPU):
            continue
        best = {"flops_per_second": 0.0}
        for m, k, n in [*shapes, (SQUARE,) * 3]:
            left, right = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)
            seconds = []
            for _ in range(PRODUCT_RUNS):
                start = time.perf_counter()
                nn.functional.linear(left, right)
                seconds.append(time.perf_counter() - start)
            rate = 2 * m * k * n / min(seconds)
            if rate > best["flops_per_second"]:
                best = {"flops_per_second": rate, "shape": [m, k, n], "seconds": seconds}
        rates[str(dtype).removeprefix("torch.")] = best
    return rates
