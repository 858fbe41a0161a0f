"""Right answers to the notebooks' exercises, each worked out another way than the lab does."""

import json
from dataclasses import replace
from math import prod

from labkit.data import DATA_FOLDER
from labkit.predict.prediction import predict
from labkit.shapes import BatchShape


def optimizer_state(run, result):
    trained = result.after.trainable["lora"] + result.after.trainable["head"]
    layers = {"qwen3-tiny": 2, "qwen3-small": 4}[run.after.model]
    tensors = layers * len(run.after.lora_targets) * 2 + 1
    return 8 * trained + 4 * tensors


def base_gradients(run, result):
    kept = result.before.memory.state_bytes["gradients"]
    return kept - result.after.memory.state_bytes["gradients"]


def padding_share(run, result):
    computed, real = sum(result.after.computed_tokens), sum(result.after.real_tokens)
    return (computed - real) / computed


def fewer_tokens(run, result):
    rows = len(result.after.real_tokens) * run.after.batch_size
    return rows * run.after.max_length / sum(result.after.real_tokens)


def ordinary_steps(run, result):
    ordinary = result.after.median_step_seconds
    return result.after.compile["first_step_seconds"] / ordinary - 1


SOLUTIONS = {
    "00_baseline": optimizer_state,
    "01_freeze_base": base_gradients,
    "02_checkpointing": lambda run, result: 1.5,
    "03_amp": lambda run, result: 8,  # 7 bits after the leading one; half a step is 2 ** -8
    "04_accumulation": lambda run, result: -(-run.after.batch_size // 3) / run.after.batch_size,
    "05_compile": ordinary_steps,
    "06_cached_data": padding_share,
    "07_no_padding": fewer_tokens,
}


def ladder_product(course):
    ratios = [c.speed_ratio for c in course.comparisons.values() if c.before is not None]
    return prod(ratio for ratio in ratios if ratio is not None)


def lora_parameters(targets, rank):
    """Of qwen3-mini: rank × (inputs + outputs) of each layer, from the sizes of its config."""
    config = json.loads((DATA_FOLDER / "model" / "config.json").read_text(encoding="utf-8"))
    wide, hidden = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    value = config["num_key_value_heads"] * config["head_dim"]
    sizes = {
        "q_proj": wide + query, "k_proj": wide + value, "v_proj": wide + value,
        "o_proj": query + wide, "gate_proj": wide + hidden, "up_proj": wide + hidden,
        "down_proj": hidden + wide,
    }  # fmt: skip
    return config["num_hidden_layers"] * rank * sum(sizes[target] for target in targets)


def largest_batch_traced(setting):
    """By a trace of each batch that is asked, from the largest power of two that fits."""

    def fits(pairs):
        recipe = replace(setting.recipe, batch_size=pairs)
        shape = BatchShape(pairs, setting.max_length, padded=True)
        return predict(recipe, setting.gpu, shape=shape).fit.fits

    step = pairs = 1
    while fits(pairs + step):
        pairs, step = pairs + step, 2 * step
    while step := step // 2:
        pairs += step * fits(pairs + step)
    return pairs
