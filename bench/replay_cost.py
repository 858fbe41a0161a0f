"""What a replay costs through the allocator with its settings, and written out flat.

The two run in turn on the same steps. Usage: python bench/replay_cost.py
"""

import time
from dataclasses import replace
from statistics import median

from labkit.model_source import find_model
from labkit.predict.allocator import replay
from labkit.predict.gpus import find_gpu
from labkit.predict.plain_replay import plain_replay
from labkit.predict.prediction import precision_on
from labkit.predict.recipe_step import RecipeStep
from labkit.predict.recipe_trace import step_trace
from labkit.recipe import Recipe
from labkit.shapes import BatchShape
from labkit.space import kinds

ROUNDS = 15


def main() -> None:
    """Print a row for each recipe."""
    gpu = find_gpu("rtx-4090")
    base = Recipe(model="Qwen/Qwen3-Embedding-0.6B", optimizer="adamw_fused")
    source = find_model(base.model)
    print("recipe | events | allocator | flat")
    for parts in (1, 2):
        for recipe in kinds(replace(base, micro_batches=parts), "bfloat16"):
            step = RecipeStep(recipe, source, precision_on(gpu, recipe), gpu, True, 0)
            trace, _ = step_trace(step, BatchShape(128, 64, padded=True), more_to_come=True)
            times = {replay: [], plain_replay: []}
            for _ in range(ROUNDS):
                for run, seconds in times.items():
                    start = time.perf_counter()
                    run(trace.events, trace.sizes)
                    seconds.append(1000 * (time.perf_counter() - start))
            name = f"{recipe.weights} {recipe.autocast} {recipe.checkpoint_every} {parts}"
            words = " | ".join(f"{median(seconds):.1f} ms" for seconds in times.values())
            print(f"{name} | {len(trace.events):,} | {words}")


if __name__ == "__main__":
    main()
