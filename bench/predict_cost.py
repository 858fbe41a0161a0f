"""What a prediction costs: seconds of the first, milliseconds of a further one, memory.

Each model is predicted in a process of its own, so that nothing is left from the one before.
Imports are not counted: a notebook makes them once. Usage: python bench/predict_cost.py
"""

import json
import resource
import subprocess
import sys
import time
from statistics import median

MODELS = ("Qwen/Qwen3-Embedding-0.6B", "Qwen/Qwen3-Embedding-4B", "Qwen/Qwen3-Embedding-8B")
RUNS = 3
POINTS = [(8, 48), (32, 64), (32, 512), (100, 104), (128, 64), (128, 2048)]


def one_model(model: str) -> dict:
    """Predict a model here, in a process that has predicted nothing yet."""
    from labkit.model_source import find_model
    from labkit.precision import native_precision
    from labkit.predict.gpus import find_gpu
    from labkit.predict.peaks import peak_bytes
    from labkit.predict.prediction import predict
    from labkit.predict.recipe_step import RecipeStep
    from labkit.predict.recipe_trace import step_trace
    from labkit.recipe import Recipe
    from labkit.shapes import BatchShape
    from labkit.tokenizer import load_tokenizer

    recipe, gpu = Recipe(model=model), find_gpu("a100-40gb")
    start = time.perf_counter()
    predict(recipe, gpu, shape=BatchShape(128, 64, padded=True))
    first = time.perf_counter() - start

    precision = native_precision(recipe, lambda dtype: True, where="", prefer_half=True)
    pad = load_tokenizer(model).pad_token_id
    step = RecipeStep(recipe, find_model(model), precision, gpu, True, pad)
    further, whole = [], []
    for pairs, tokens in POINTS:
        shape = BatchShape(pairs, tokens, padded=True)
        start = time.perf_counter()
        trace, _ = step_trace(step, shape, more_to_come=True)
        peak_bytes(trace, gpu)
        further.append(time.perf_counter() - start)
        start = time.perf_counter()
        predict(recipe, gpu, shape=shape)
        whole.append(time.perf_counter() - start)
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"first": first, "further": further, "whole": whole, "process_bytes": kib * 1024}


def main() -> None:
    """Print a row for each model."""
    print("model | first report | further peak | further report with replay | process")
    for model in MODELS:
        runs = []
        for _ in range(RUNS):
            command = [sys.executable, __file__, model]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
        first = [run["first"] for run in runs]
        further = [1000 * value for run in runs for value in run["further"]]
        whole = [1000 * value for run in runs for value in run["whole"]]
        held = max(run["process_bytes"] for run in runs) / 2**30
        print(
            f"{model} | {median(first):.2f} s ({min(first):.2f}–{max(first):.2f}) | "
            f"{median(further):.1f} ms (at most {max(further):.1f}) | "
            f"{median(whole):.0f} ms (at most {max(whole):.0f}) | {held:.2f} GiB"
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(one_model(sys.argv[1])))
    else:
        main()
