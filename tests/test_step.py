import copy

import pytest
import torch
from conftest import CPU

from labkit import compiling
from labkit.compiling import CompilerMissing, compile_cache, compile_model
from labkit.recipe import LADDER_CHANGES, Recipe
from labkit.step import MAX_GRADIENT_NORM, count_layer_forwards
from labkit.tokens import Batch
from labkit.trainable import TrainingError, check_gradients, check_trainable


def losses(step, batches):
    return [step(batch) for batch in batches]


def gradients(step):
    return torch.cat([p.grad.flatten() for p in step.trained])


def first_pairs(batch, count):
    return Batch(
        batch.input_ids[:count], batch.attention_mask[:count], batch.labels[:count], None
    )


def test_the_first_ladder_steps_train_alike_to_the_last_bit(tiny_step, tiny_batches):
    batches = tiny_batches(4, padding="max")
    fields = {"train_base": True, "padding": "max"}
    expected = losses(tiny_step(**fields), batches)
    for slug in ("01_freeze_base", "02_checkpointing"):
        fields |= LADDER_CHANGES[slug]
        assert losses(tiny_step(**fields), batches) == expected, slug
    fields |= LADDER_CHANGES["04_accumulation"]
    assert losses(tiny_step(**fields), batches) == pytest.approx(expected, abs=1e-6)
    fields |= LADDER_CHANGES["06_cached_data"]  # the batches are compared in test_tokens
    assert losses(tiny_step(**fields), batches) == pytest.approx(expected, abs=1e-6)


def test_autocast_changes_the_loss_by_rounding_only(tiny_step, tiny_batches):
    batches = tiny_batches(3)
    exact = losses(tiny_step(), batches)
    rounded = losses(tiny_step(autocast="bfloat16"), batches)
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=2**-7)  # bfloat16 has 8 significant bits


def test_a_fused_optimizer_makes_the_same_update(tiny_step, tiny_batches):
    batches = tiny_batches(3)
    plain, fused = tiny_step(), tiny_step(optimizer="adamw_fused")
    assert losses(fused, batches) == pytest.approx(losses(plain, batches), rel=1e-5)
    assert fused.optimizer.defaults["fused"] is True
    assert plain.optimizer.defaults["fused"] is None  # torch chooses, foreach on a card


def test_the_loss_is_that_of_the_model_itself(tiny_step, tiny_batches):
    step, (batch,) = tiny_step(), tiny_batches(1)
    output = step.model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels
    )
    assert step(batch) == pytest.approx(output.loss.item(), rel=1e-6)


def test_the_update_is_that_of_adamw_on_the_clipped_gradient(tiny_step, tiny_batches):
    step, (batch,) = tiny_step(learning_rate=1e-2), tiny_batches(1)
    before = [p.detach().clone() for p in step.trained]
    step(batch)
    for parameter, old in zip(step.trained, before, strict=True):
        grad = parameter.grad  # clipped in place
        # first step of Adam: both bias-corrected moments are the gradient and its square
        expected = old * (1 - 1e-2 * 0.01) - 1e-2 * grad / (grad.abs() + 1e-8)
        assert torch.allclose(parameter, expected, atol=1e-6)


def test_gradients_are_clipped_to_the_norm(tiny_step, tiny_batches):
    step, (batch,) = tiny_step(), tiny_batches(1)
    with torch.no_grad():
        step.trained[-1].mul_(200)  # a large head makes large gradients
    step(batch)
    assert gradients(step).norm().item() == pytest.approx(MAX_GRADIENT_NORM, rel=1e-3)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 8])
def test_parts_of_any_size_give_the_gradient_of_the_whole(
    tiny_step, tiny_batches, micro_batches
):
    (batch,) = tiny_batches(1)
    whole, parts = tiny_step(), tiny_step(micro_batches=micro_batches)
    assert whole(batch) == pytest.approx(parts(batch), rel=1e-6)
    assert torch.allclose(gradients(whole), gradients(parts), atol=1e-6)


def test_a_mean_of_means_would_be_wrong_for_uneven_parts(tiny_step, tiny_batches):
    step, (batch,) = tiny_step(micro_batches=3), tiny_batches(1)
    step(batch)
    right = gradients(step)
    step = tiny_step(micro_batches=3)
    for part in batch.split(3):  # 3, 3 and 2 pairs
        (step.loss(part, pairs=len(part.labels)) / 3).backward()
    wrong = gradients(step)
    assert (wrong - right).norm() / right.norm() > 0.01


def test_a_last_batch_smaller_than_its_parts_is_stepped(tiny_step, tiny_batches):
    (batch,) = tiny_batches(1)
    small = first_pairs(batch, 3)
    step, whole = tiny_step(micro_batches=4), tiny_step()
    assert step(small) == pytest.approx(whole(small), rel=1e-6)
    assert torch.allclose(gradients(step), gradients(whole), atol=1e-6)


def test_base_gradients_are_kept_and_never_applied(tiny_step, tiny_batches):
    step = tiny_step(train_base=True)
    weight = step.model.get_base_model().model.layers[0].mlp.up_proj.weight
    before = weight.detach().clone()
    first, second = tiny_batches(2)
    step(first)
    kept = weight.grad.clone()
    step(second)
    assert torch.equal(weight, before)
    assert kept.any()
    assert not torch.equal(weight.grad, kept)  # the optimizer clears only what it updates


def test_float16_is_unscaled_before_it_is_clipped(tiny_step, tiny_batches):
    (batch,) = tiny_batches(1)
    half, full = tiny_step(autocast="float16"), tiny_step()
    assert half.scaler.is_enabled()
    half.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    half(batch)
    full(batch)
    assert half.skipped_steps == 0
    # clipped first, the update would see a gradient 1024 times too small
    assert torch.allclose(gradients(half), gradients(full), atol=0.02)
    assert gradients(half).norm().item() == pytest.approx(MAX_GRADIENT_NORM, rel=1e-3)


def test_a_step_with_an_infinite_gradient_is_skipped_and_counted(tiny_step, tiny_batches):
    step, (batch,) = tiny_step(autocast="float16"), tiny_batches(1)
    step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = [p.detach().clone() for p in step.trained]
    step(batch)
    assert step.skipped_steps == 1
    assert all(torch.equal(p, old) for p, old in zip(step.trained, before, strict=True))
    assert step.scaler.get_scale() == 2.0**39


@pytest.mark.parametrize(("every", "runs"), [(0, 1.0), (1, 2.0), (2, 1.5)])
def test_recomputation_is_counted(tiny_step, tiny_batches, every, runs):
    step, (batch,) = tiny_step(checkpoint_every=every), tiny_batches(1)
    step(batch)
    before = gradients(step)
    assert count_layer_forwards(step, first_pairs(batch, 2)) == runs
    assert torch.equal(gradients(step), before)


def test_a_model_in_evaluation_mode_recomputes_nothing(tiny_step, tiny_batches):
    step, (batch,) = tiny_step(checkpoint_every=1), tiny_batches(1)
    step.model.eval()
    assert count_layer_forwards(step, batch) == 1.0


def test_every_adapter_has_a_gradient_after_the_first_step(tiny_step, tiny_batches):
    for checkpoint_every in (0, 1):
        step = tiny_step(checkpoint_every=checkpoint_every)
        step(tiny_batches(1)[0])
        check_gradients(step.model)


def test_adapters_that_a_checkpoint_cuts_off_are_refused(tiny_step, tiny_batches):
    step, (batch,) = tiny_step(), tiny_batches(1)
    base = step.model.get_base_model()
    base.activation_checkpointing_enable({"use_reentrant": True})
    base.disable_input_require_grads()
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        step(batch)  # the head learns, so nothing else is raised
    with pytest.raises(TrainingError, match="6 of 7 trained tensors have no gradient"):
        check_gradients(step.model)


def test_a_frozen_adapter_is_refused_before_the_first_step(tiny_step):
    step = tiny_step()
    step.model.requires_grad_(False)  # the advice of many articles
    with pytest.raises(TrainingError, match=r"lora and head: not trained.*lora 0, head 0"):
        check_trainable(step.model, step.recipe)


def test_a_frozen_head_is_refused(tiny_step):
    step = tiny_step()
    for name, parameter in step.model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    with pytest.raises(TrainingError, match=r"^head: not trained"):
        check_trainable(step.model, step.recipe)


def test_base_gradients_must_be_as_the_recipe_says(tiny_step):
    step = tiny_step(train_base=True)
    with pytest.raises(TrainingError, match=r"^base: not trained as the recipe says"):
        check_trainable(step.model, Recipe(train_base=False))


def test_marks_name_the_phases_in_order(tiny_step, tiny_batches):
    marks = []
    tiny_step(micro_batches=2)(tiny_batches(1)[0], mark=marks.append)
    assert marks == ["forward", "backward", "forward", "backward", "optimizer"]


def test_without_a_compiler_the_reason_is_said(tiny_step, monkeypatch):
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none_found():
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_found)
    with pytest.raises(CompilerMissing, match=r"needs a C\+\+ compiler and finds none"):
        tiny_step(compile="default")


def test_nothing_is_wrapped_unless_asked_for(tiny_step):
    step = tiny_step()
    assert compile_model(step.model, step.recipe, CPU) is step.model


def test_the_compile_cache_is_emptied_when_cold_and_kept_when_warm(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "earlier")
    kernel = tmp_path / "inductor" / "kernel"
    for cold in (True, False, True):
        with compile_cache(tmp_path, cold=cold):
            assert compiling.os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(kernel.parent)
            assert kernel.exists() == (not cold)
            kernel.parent.mkdir(exist_ok=True)
            kernel.touch()
        assert compiling.os.environ["TORCHINDUCTOR_CACHE_DIR"] == "earlier"


def test_two_steps_from_one_seed_are_equal(tiny_step):
    first, second = tiny_step(), tiny_step()
    state = copy.deepcopy(first.model.state_dict())
    assert all(
        torch.equal(value, state[key]) for key, value in second.model.state_dict().items()
    )


@pytest.mark.parametrize("threads", [0, 1])
def test_a_step_uses_its_threads_and_leaves_those_of_others(threads, tiny_step, tiny_batches):
    step, before, seen = tiny_step(threads=threads), torch.get_num_threads(), []
    (batch,) = tiny_batches(1)
    step(batch, mark=lambda phase: seen.append(torch.get_num_threads()))
    assert set(seen) == {threads or before}
    assert torch.get_num_threads() == before
