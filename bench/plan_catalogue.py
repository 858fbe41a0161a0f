"""How long plans for the whole catalogue take, and what they are.

Every card, two models, four lengths, in one process. Imports are not counted. Usage:
python bench/plan_catalogue.py
"""

import time

from labkit.plan import Job, search
from labkit.plan_words import plan_row
from labkit.predict.gpus import GPUS
from labkit.recipe import Recipe

MODELS = ("Qwen/Qwen3-Embedding-0.6B", "Qwen/Qwen3-Embedding-4B")
LENGTHS = (64, 512, 2048, 8192)
BATCH_SIZE = 128


def main() -> None:
    """Print a row for each plan, and the seconds of all."""
    seconds = []
    for model in MODELS:
        for tokens in LENGTHS:
            recipe = Recipe(model=model, batch_size=BATCH_SIZE, max_length=tokens)
            for gpu in GPUS.values():
                start = time.perf_counter()
                found = search(Job(recipe), gpu)
                seconds.append(time.perf_counter() - start)
                words = "nothing fits: " + "; ".join(found.remedies)
                if found.plans:
                    row = plan_row(found.plans[0], found.plans[0].seconds)
                    words = " | ".join(list(row.values())[:-1])
                print(f"{model} | {tokens} | {gpu.name} | {words}", flush=True)
    print(f"{len(seconds)} plans, {sum(seconds):.1f} s, the longest {max(seconds):.1f} s")


if __name__ == "__main__":
    main()
