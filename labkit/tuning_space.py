"""What tuning may change: fields that change a step's cost, and neither its loss nor gradients.

Batch size, lengths, LoRA, learning rate, seed, instruction and model are never among them. Nor
is ``padding: grouped``, which puts other pairs together: it stays where it is asked for.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from labkit.machine import machine_facts
from labkit.precision import has_native
from labkit.recipe import Recipe, RecipeError, differences
from labkit.space import even_parts

STAGES = ("padding", "precision", "optimizer and loader", "parts", "compile")
WORTH_A_WORKER = 0.02  # share of a step that its batch takes to make
PARTS_TRIED = 3  # of each checkpointing: the fewest parts that fit, then more


@dataclass(frozen=True)
class Space:
    """The recipes that do what a given one does.

    Attributes:
        given: The recipe that is to be tuned.
        fixed: Its fields that stay as they are.
        half: The 16-bit format that the device computes in; empty where it has none.
        threads: Numbers of threads to try; 0 is what torch chooses.
        fast_dropout: Whether random numbers are drawn one by one there, and dropout needs some.
    """

    given: Recipe
    fixed: frozenset[str] = frozenset()
    half: str = ""
    threads: tuple[int, ...] = (0,)
    fast_dropout: bool = False

    def start(self) -> Recipe:
        """The given recipe without work that nobody needs, in one part."""
        wanted = {
            "train_base": False, "cached": True, "checkpoint_every": 0, "micro_batches": 1,
            "compile": "none",
        }  # fmt: skip
        if self.fast_dropout:
            wanted["fast_dropout"] = True
        return replace(self.given, **{n: v for n, v in wanted.items() if n not in self.fixed})

    def candidates(self, stage: str, best: Recipe, *, data_share: float = 1.0) -> list[Recipe]:
        """The recipes of a stage, each different from the best so far.

        Args:
            data_share: Of a step, what making its batch takes.
        """
        changes = {
            "padding": self._padding,
            "precision": self._precision,
            "optimizer and loader": lambda: self._loader(data_share),
            "parts": self._parts,
            "compile": lambda: [{"compile": mode} for mode in ("none", "default")],
        }[stage]()
        return list(self.vary(best, changes))

    def smaller(self, recipe: Recipe) -> list[Recipe]:
        """The recipe, then with more and more of it saved: parts first, which cost less."""
        return [recipe, *self.vary(recipe, self._parts())]

    def kinds(self, recipe: Recipe) -> list[Recipe]:
        """The recipe in every precision, as it is padded and with the least computed."""
        paddings = [recipe, *self.vary(recipe, self._padding())]
        return [
            kind
            for padded in dict.fromkeys((paddings[0], paddings[-1]))
            for kind in (padded, *self.vary(padded, self._precision()))
        ]

    def vary(self, recipe: Recipe, changes: Collection[dict]) -> Iterator[Recipe]:
        """The recipe with each change that touches no fixed field and contradicts no other."""
        seen = {recipe}
        for change in changes:
            try:
                varied = replace(recipe, **change)
            except RecipeError:
                continue  # for example another attention than padding none brings
            if varied not in seen and not self.fixed & differences(recipe, varied).keys():
                seen.add(varied)
                yield varied

    def _padding(self) -> list[dict]:
        if self.given.padding == "grouped":
            return []
        names = ("padding", "last_token_only", "shared_prefix")
        values = [("longest", False, False)]
        values += [("none", *flags) for flags in product((False, True), repeat=2)]
        return [dict(zip(names, value, strict=True)) for value in values]

    def _precision(self) -> list[dict]:
        if not self.half:
            return []
        weights, autocast = ("float32", self.half), ("none", self.half)
        return [{"weights": w, "autocast": a} for w, a in product(weights, autocast)]

    def _loader(self, data_share: float) -> list[dict]:
        values = {
            "optimizer": ("adamw", "adamw_fused"),
            "num_workers": (0, 1) if data_share > WORTH_A_WORKER else (self.given.num_workers,),
            "threads": self.threads,
        }
        return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]

    def _parts(self) -> list[dict]:
        parts = even_parts(self.given.batch_size)
        return [{"checkpoint_every": c, "micro_batches": p} for c, p in product((0, 1), parts)]


def space_on(device: torch.device, recipe: Recipe, fixed: Collection[str] = ()) -> Space:
    """What may be changed of a recipe on a device."""
    half = next(
        (n for n in ("bfloat16", "float16") if has_native(getattr(torch, n), device)), ""
    )
    cores = machine_facts("cpu")["cores"]
    more = device.type == "cpu" and cores != torch.get_num_threads()
    threads = (0, cores) if more else (recipe.threads,)
    by_one = device.type == "cpu" and recipe.lora_dropout > 0
    return Space(recipe, frozenset(fixed), half, threads, fast_dropout=by_one)
