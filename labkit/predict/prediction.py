"""What a recipe would cost on a machine that is not here: the same report, from no run."""

from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from labkit.data import Pairs
from labkit.machine import installed_versions, machine_facts
from labkit.model_source import ModelSource, check_recipe_fits, find_model
from labkit.precision import Precision, choose_precision, native_precision
from labkit.predict.attention import has_cudnn_attention
from labkit.predict.events import Trace
from labkit.predict.gpus import Gpu, find_gpu
from labkit.predict.peaks import cpu_memory, cuda_memory, judge_fit
from labkit.predict.recipe_step import RecipeStep
from labkit.predict.recipe_trace import step_trace
from labkit.predict.roofline import model_time
from labkit.predict.trace import trace_step
from labkit.recipe import Recipe
from labkit.report import Report
from labkit.shapes import BatchShape, worst_shape
from labkit.tokenizer import load_tokenizer
from labkit.tokens import instruction_tokens

CPU = torch.device("cpu")


class PredictError(ValueError):
    """A prediction that cannot be made as asked; the message says what to change."""


def predict(
    recipe: Recipe,
    gpu: Gpu | str | None = None,
    *,
    pairs: Pairs | None = None,
    shape: BatchShape | None = None,
    source: ModelSource | None = None,
    expandable_segments: bool = False,
    emulate: bool = False,
) -> Report:
    """Predict one optimizer step of a recipe, without the hardware and without weights.

    Args:
        gpu: A card or its name; None for this machine's CPU.
        pairs: The data: the step is that of its worst batch. Needed unless ``shape`` is given.
        shape: The batch to predict.
        source: Stands in for the model that the recipe names.
        expandable_segments: As in ``PYTORCH_CUDA_ALLOC_CONF``.
        emulate: Without ``gpu``: number formats that this CPU only imitates, as in ``measure``.

    Returns:
        A report whose oracle is ``predicted``; its seconds are ``modelled``.

    Raises:
        GpuError: No card of that name.
        ModelError, TokenizerError: As for a measurement.
        PredictError: Neither data nor a shape, or an attention that cannot be traced.
        TraceError: The model's step cannot be run without data.
    """
    gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
    if gpu and emulate:
        raise PredictError("emulate is for this machine's CPU: leave out the card, or emulate.")
    check_attention(recipe)
    source = source or find_model(recipe.model)
    tokenizer = load_tokenizer(recipe.model)
    before = len(instruction_tokens(recipe, tokenizer))
    check_recipe_fits(source, recipe, len(tokenizer), before=before)
    if shape is None:
        if pairs is None:
            raise PredictError("a prediction needs pairs, or the shape of a batch.")
        shape = worst_shape(recipe, pairs, tokenizer)
    precision = precision_on(gpu, recipe, emulate=emulate)
    report = Report(
        recipe=recipe,
        oracle="predicted",
        precision=precision.to_dict(),
        model=source.facts(),
        data=pairs.facts() if pairs else {},
        batch=shape.to_dict(),
    )
    plain = replace(recipe, compile="none", cached=False)  # one timeline serves them all
    step = RecipeStep(
        plain, source, precision, gpu, shape.padded, tokenizer.pad_token_id,
        lengths=shape.lengths, shared=shape.shared,
    )  # fmt: skip
    trace, report.trainable = step_trace(step, shape)
    if precision.reason:
        report.notes.append(precision.reason)
    uneven = shape.pairs % recipe.micro_batches or recipe.padding == "none"
    if recipe.micro_batches > 2 and not uneven:
        report.notes.append(
            f"timeline: parts 3 to {recipe.micro_batches} do with memory what part 2 does, and "
            "are left out"
        )
    if recipe.compile != "none":
        report.notes.append(
            "compile: these are the bytes of the step without torch.compile, whose fused "
            "kernels keep other tensors"
        )
    return complete(report, trace, gpu, expandable_segments=expandable_segments)


def check_attention(recipe: Recipe) -> None:
    """Refuse an attention whose bytes a trace cannot tell.

    Raises:
        PredictError: It is flash_attention_2.
    """
    if recipe.attention == "flash_attention_2":
        raise PredictError(
            "attention flash_attention_2 takes padding out of the batch, so its bytes depend "
            "on the texts; predict with sdpa, whose kernel is the same where nothing is padded."
        )


def predict_step(
    build: Callable[[], tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]],
    gpu: Gpu | str | None = None,
    *,
    name: str = "a step",
    steps: int = 2,
    padded: bool = True,
    warm_up_bytes: int = 0,
    expandable_segments: bool = False,
) -> Report:
    """Predict any training step in plain PyTorch.

    ::

        def build():
            model = AutoModelForCausalLM.from_config(config)
            optimizer = torch.optim.AdamW(model.parameters())

            def step():
                ids = torch.zeros(8, 512, dtype=torch.int64)
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            return model, optimizer, step

        predict_step(build, gpu="a100-40gb")

    Args:
        build: Returns model, optimizer and step, on no device in particular. The step makes its
            batch; what it keeps alive from call to call stays alive here, too, and what it
            gives back by ``torch.cuda.empty_cache`` is given back.
        gpu: A card or its name; None for a CPU.
        name: What the report calls the step.
        steps: How many are run; the report is about the last, and reserved bytes about all.
        padded: Whether an attention mask that the step makes is to count as holding padding.
        warm_up_bytes: Allocated and freed before the weights, as transformers does where it
            loads onto a device.
        expandable_segments: As in ``PYTORCH_CUDA_ALLOC_CONF``.

    Raises:
        GpuError: No card of that name.
        TraceError: The step cannot be run without data.
    """
    gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu

    def build_marked():
        made = build()
        if not isinstance(made, tuple) or len(made) != 3:
            raise PredictError("build has to return three things: model, optimizer, step.")
        model, optimizer, step = made
        return model, optimizer, lambda mark: step()

    trace = trace_step(
        build_marked, gpu, steps=steps, padded=padded, warm_up_bytes=warm_up_bytes
    )
    report = Report(recipe=None, oracle="predicted", model={"name": name})
    return complete(report, trace, gpu, expandable_segments=expandable_segments)


def complete(
    report: Report,
    trace: Trace,
    gpu: Gpu | None,
    *,
    expandable_segments: bool = False,
    brief: bool = False,
) -> Report:
    """Fill in what a trace says; in brief, without what only figures of one step show."""
    if gpu is None:
        report.machine = machine_facts("cpu")
        report.memory = cpu_memory(trace, brief=brief)
        return report
    report.machine = {
        "name": gpu.title,
        "device": "cuda",
        "gpu": gpu.name,
        "versions": installed_versions(),
    }
    report.memory = cuda_memory(trace, expandable_segments=expandable_segments, brief=brief)
    report.fit = judge_fit(trace, report.memory, gpu, expandable_segments=expandable_segments)
    report.modelled = asdict(model_time(trace.costs[-1], gpu))
    if gpu.vendor == "amd":
        report.notes.append("attention on AMD cards is predicted as on NVIDIA's")
    products = trace.costs[-1]
    used = {
        dtype for dtype, flops in zip(products.dtypes, products.flops, strict=True) if flops
    }
    if has_cudnn_attention(gpu) and used & {"float16", "bfloat16"}:
        report.notes.append("the workspace of cuDNN's attention is not known, and not counted")
    for dtype in sorted(used - set(gpu.native_dtypes)):
        report.notes.append(
            f"the step multiplies in {dtype}, for which {gpu.title} has no instructions: it "
            "imitates them slowly"
        )
    return report


def precision_on(gpu: Gpu | None, recipe: Recipe, *, emulate: bool = False) -> Precision:
    """The formats in which a card, or this machine's CPU, would run a recipe."""
    if gpu is None:
        return choose_precision(recipe, CPU, emulate=emulate)
    native = {getattr(torch, name) for name in gpu.native_dtypes}
    return native_precision(recipe, native.__contains__, where=gpu.title, prefer_half=True)
