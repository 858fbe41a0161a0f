"""Plans against every recipe of a small space, each traced as it is, without timelines."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from labkit.cli import app
from labkit.job import Job, aligned
from labkit.limits import largest_batch, longest, smallest_card
from labkit.model_source import find_model, geometry
from labkit.plan import BEST, Plan, search
from labkit.plan_words import gives_up, headline, plan_notes, plan_row, plan_rows
from labkit.predict.gpus import GPUS, find_gpu
from labkit.predict.outlook import Outlook
from labkit.predict.peaks import cuda_memory
from labkit.predict.prediction import precision_on
from labkit.predict.recipe_step import RecipeStep
from labkit.predict.roofline import model_time
from labkit.predict.segments import MIB
from labkit.recipe import Recipe
from labkit.shapes import mean_longest, pair_lengths
from labkit.space import CHECKPOINTS, PlanError
from labkit.tokenizer import load_tokenizer

PAIRS, TOKENS = 4, 512
RECIPE = Recipe(model="qwen3-tiny", batch_size=PAIRS, max_length=TOKENS)
L4 = find_gpu("l4")
ALL_KINDS = frozenset({"weights", "autocast", "checkpoint_every"})


def job(recipe=RECIPE, **values):
    return Job(recipe, **{"margin": 0, **values})


def card_with(room_bytes, gpu=L4):
    """A card on which a step may reserve so many bytes."""
    return replace(gpu, memory_bytes=gpu.context_bytes + room_bytes)


def kind_of(recipe):
    return recipe.weights, recipe.autocast, recipe.checkpoint_every


def full_trace(recipe):
    """Reserved bytes and seconds on an L4, without timelines and with every part."""
    source, precision = find_model(recipe.model), precision_on(L4, recipe)
    trace = RecipeStep(recipe, source, precision, L4, True, 0).trace([(PAIRS, TOKENS)] * 2)
    return (
        cuda_memory(trace, brief=True).peak_reserved_bytes,
        model_time(trace.costs[-1], L4).least_seconds,
    )


@pytest.fixture(scope="module")
def every_recipe():
    """What every recipe of the space needs, the optimizer aside."""
    return {
        recipe: full_trace(recipe)
        for weights in ("float32", "bfloat16")
        for autocast in ("none", "bfloat16")
        for every in CHECKPOINTS
        for parts in (1, 2, 4)
        for recipe in (
            replace(
                RECIPE, weights=weights, autocast=autocast, checkpoint_every=every,
                micro_batches=parts, optimizer="adamw_fused",
            ),
        )
    }  # fmt: skip


def test_one_kernel_of_adamw_is_never_slower_and_takes_hardly_more(every_recipe):
    for recipe, (reserved, seconds) in every_recipe.items():
        if recipe.micro_batches == 1 and not recipe.checkpoint_every:
            plain_reserved, plain_seconds = full_trace(replace(recipe, optimizer="adamw"))
            assert seconds <= plain_seconds
            assert reserved <= plain_reserved + 2 * MIB  # its step counts lie on the card


def best_by_kind(every_recipe, room_bytes):
    """Of each kind the fastest recipe that fits, and of these the fastest."""
    best = {}
    for recipe, (reserved, seconds) in every_recipe.items():
        kind = kind_of(recipe)
        if reserved <= room_bytes and seconds < best.get(kind, (None, float("inf")))[1]:
            best[kind] = recipe, seconds
    return sorted(best.values(), key=lambda found: found[1])[:BEST]


@pytest.mark.parametrize("share", [1.0, 0.6, 0.3, 0.1, 0.02])
def test_no_recipe_of_the_space_is_better_than_the_plan(every_recipe, share):
    reserved = sorted(need for need, _ in every_recipe.values())
    room = reserved[int(share * (len(reserved) - 1))]
    expected = best_by_kind(every_recipe, room)
    found = search(job(), card_with(room)).plans
    assert [kind_of(plan.recipe) for plan in found] == [kind_of(r) for r, _ in expected]
    for plan, (recipe, seconds) in zip(found, expected, strict=True):
        assert plan.recipe.micro_batches == recipe.micro_batches
        assert plan.recipe.optimizer == "adamw_fused"
        assert plan.seconds == pytest.approx(seconds, rel=1e-3)
        fused = replace(recipe, cached=False, padding="longest")
        assert plan.report.memory.peak_reserved_bytes == every_recipe[fused][0]


def test_nothing_smaller_than_the_least_need_fits(every_recipe):
    least = min(need for need, _ in every_recipe.values())
    assert search(job(), card_with(least)).plans
    found = search(job(), card_with(least - 2 * MIB))
    assert not found.plans
    assert "nothing fits" in headline(found)


def test_the_remedies_are_the_largest_that_fit(every_recipe):
    least = min(need for need, _ in every_recipe.values())
    gpu = card_with(least - 2 * MIB)
    shorter, card = search(job(), gpu).remedies
    tokens = int(shorter.rpartition(" ")[2].rstrip(")"))
    assert tokens < TOKENS
    assert search(job(replace(RECIPE, max_length=tokens)), gpu).plans
    for kind in job().kinds(gpu):
        outlook = Outlook(replace(kind, micro_batches=PAIRS), gpu)
        for longer in range(tokens + 8, TOKENS + 8, 8):
            assert outlook.report(PAIRS, longer).fit.margin_bytes < 0, longer
    assert card == "as it is, NVIDIA RTX 2080 Ti 11GB (--gpu rtx-2080-ti)"


def fits(recipe, pairs, tokens, gpu):
    return Outlook(recipe, gpu).report(pairs, tokens).fit.margin_bytes >= 0


def test_the_largest_batch_is_that_of_trying_each():
    gpu = card_with(200 * MIB)
    found = largest_batch(job(fixed=ALL_KINDS | {"micro_batches"}), gpu)
    ((kind, most),) = found.items()
    tried = [pairs for pairs in range(1, 40) if fits(kind, pairs, TOKENS, gpu)]
    assert tried == list(range(1, most + 1))
    assert 1 < most < 39


def test_the_longest_pairs_are_those_of_trying_each():
    gpu = card_with(30 * MIB)
    ((kind, most),) = longest(job(fixed=ALL_KINDS | {"micro_batches"}), gpu).items()
    tried = [tokens for tokens in range(8, 512, 8) if fits(kind, PAIRS, tokens, gpu)]
    assert tried == list(range(8, most + 1, 8))
    assert 8 < most < 504


def test_no_smaller_card_will_do():
    recipe = Recipe(model="Qwen/Qwen3-Embedding-4B", batch_size=16, max_length=256)
    asked = job(recipe, fixed=ALL_KINDS)  # 16 GB of float32 weights alone
    card = smallest_card(asked)
    assert card.memory_bytes > 16e9
    cards = list(GPUS.values())
    assert not any(search(asked, gpu).plans for gpu in cards[: cards.index(card)])
    assert search(asked, card).plans


def test_given_fields_stay_as_they_are():
    recipe = replace(RECIPE, weights="float16", micro_batches=4, padding="max")
    fixed = frozenset({"weights", "micro_batches", "autocast", "cached", "padding"})
    plans = search(job(recipe, fixed=fixed), find_gpu("t4")).plans
    assert len(plans) == BEST
    for plan in plans:
        for field in fixed:
            assert getattr(plan.recipe, field) == getattr(recipe, field), field


def test_another_optimizer_is_planned_with_where_it_is_given():
    fixed = ALL_KINDS | {"micro_batches", "optimizer"}
    (plan,) = search(job(fixed=fixed), L4).plans
    assert plan.recipe.optimizer == "adamw"


def test_a_card_without_bfloat16_plans_with_float16():
    plans = search(job(), find_gpu("v100-16gb")).plans
    formats = {plan.recipe.weights for plan in plans} | {p.recipe.autocast for p in plans}
    assert "float16" in formats
    assert "bfloat16" not in formats


def test_the_margin_stays_free():
    asked = job(margin=0.25)
    assert asked.budget_bytes(L4) == int(0.75 * L4.memory_bytes) - L4.context_bytes
    whole, less = (search(job(margin=m), card_with(2**31)).plans[0] for m in (0, 0.8))
    assert less.report.memory.peak_reserved_bytes < 0.2 * 2**31
    assert whole.seconds <= less.seconds


def test_lengths_are_planned_in_eights():
    assert [aligned(tokens) for tokens in (1, 8, 9, 18.5, 64)] == [8, 8, 16, 24, 64]
    asked = job(tokens=99, mean_tokens=60.2)
    assert (asked.tokens, asked.round_tokens, asked.mean_tokens) == (99, 104, 64)


def test_a_length_between_eights_fits_as_it_is():
    """Masks of such lengths are padded first, which can take more than a longer length."""
    recipe = Recipe(model="qwen3-tiny", batch_size=4, max_length=1017)
    fixed = ALL_KINDS | {"micro_batches"}
    exact, rounded = (
        Outlook(replace(recipe, optimizer="adamw_fused"), L4).report(4, tokens).memory
        for tokens in (1017, 1024)
    )
    assert exact.peak_reserved_bytes > rounded.peak_reserved_bytes
    enough, short = (card_with(exact.peak_reserved_bytes - less) for less in (0, 2 * MIB))
    (plan,) = search(job(recipe, fixed=fixed), enough).plans
    assert plan.report.memory == exact
    assert not search(job(recipe, fixed=fixed), short).plans


def test_parts_that_do_not_divide_the_batch():
    recipe = replace(RECIPE, batch_size=10, micro_batches=3)
    with pytest.raises(
        PlanError, match=r"10 has no 3 equal parts .*; 1, 2, 5, 10 are possible"
    ):
        job(recipe, fixed=frozenset({"micro_batches"}))


def test_pairs_longer_than_the_recipe_reads():
    with pytest.raises(PlanError, match=r"pairs of 600 tokens, .* max_length of 512"):
        job(tokens=600)


def test_a_model_of_one_layer_has_no_second_one_to_recompute(tmp_path):
    config = geometry("qwen3-tiny")
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    config.save_pretrained(tmp_path)
    recipe = replace(RECIPE, model=str(tmp_path / "config.json"))
    assert {kind.checkpoint_every for kind in job(recipe).kinds(L4)} == {0, 1}


def test_the_positions_of_a_model_may_be_no_multiple_of_8(tmp_path):
    config = geometry("qwen3-tiny")
    config.max_position_embeddings = 130
    config.save_pretrained(tmp_path)
    asked = job(replace(RECIPE, model=str(tmp_path / "config.json"), max_length=130))
    assert (asked.round_tokens, asked.mean_tokens, asked.length_limit) == (130, 128, 128)


def test_a_given_16_bit_format_is_that_of_autocast_too():
    recipe = replace(RECIPE, weights="float16")
    found = job(recipe, fixed=frozenset({"weights"})).kinds(L4)
    assert {kind.autocast for kind in found} == {"none", "float16"}


def test_the_mean_longest_pair_of_batches(pairs):
    tokenizer = load_tokenizer("qwen3-tiny")
    lengths = pair_lengths(pairs, tokenizer)
    assert lengths == [
        len(tokenizer(a, b)["input_ids"])
        for a, b in zip(pairs.first, pairs.second, strict=True)
    ]
    assert mean_longest(lengths, 1) == pytest.approx(sum(lengths) / len(lengths), rel=0.15)
    assert mean_longest(lengths, len(lengths)) == max(lengths)


# ---- words


def a_plan(**fields):
    recipe = Recipe(model="qwen3-tiny", **fields)
    return Plan(recipe, Outlook(recipe, find_gpu("t4")).report(32, 64), 1.0)


def test_what_is_given_up():
    assert gives_up(a_plan()) == ["nothing"]
    fields = {"checkpoint_every": 1, "micro_batches": 4}
    all_of_it = gives_up(a_plan(weights="float16", autocast="float16", **fields))
    for words in ("kept and computed in float16", "65,504", "twice", "8 pairs are"):
        assert any(words in sentence for sentence in all_of_it), words
    assert "every 2nd layer" in gives_up(a_plan(checkpoint_every=2))[0]


def test_words_are_of_the_formats_that_are_used():
    plan = a_plan(weights="bfloat16")  # which a T4 does not have
    assert plan_row(plan, 1.0)["Precision"] == "fp16"
    assert "computed in float16 (11 significant bits)" in gives_up(plan)[0]
    assert "bfloat16 was asked for, float16 is used" in plan_notes([plan])[1]
    assert plan_row(a_plan(autocast="float16"), 1.0)["Precision"] == "fp32 + autocast"


def test_rows_are_in_the_order_of_the_plans():
    rows = plan_rows(search(job(), L4))
    assert rows[0]["Ratio"] == "1.00×"
    shares = [float(row["Ratio"].rstrip("×")) for row in rows]
    assert shares == sorted(shares)
    assert rows[0]["Parts × pairs"] == "1 × 4"


# ---- the command


def invoke(*arguments):
    return CliRunner().invoke(app, ["plan", "--profile", "tiny", *map(str, arguments)])


def test_a_card_gets_three_plans_and_what_they_give_up():
    result = invoke("--gpu", "t4", "--max-length", 64)
    assert result.exit_code == 0, result.output
    assert "8 pairs of at most 64 tokens" in result.stdout
    for number in range(1, BEST + 1):
        assert f"{number} gives up: " in result.stdout
    command = result.stdout.splitlines()[-1].partition("labkit ")[2].split()
    again = CliRunner().invoke(app, [*command, "--json"])
    shown = json.loads(invoke("--gpu", "t4", "--max-length", 64, "--json").stdout)
    best = shown["searches"][0]["plans"][0]["report"]["memory"]
    memory = json.loads(again.stdout)["memory"]
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "by_owner"):
        assert memory[name] == best[name], name


def test_json_holds_recipes_and_reports():
    result = invoke("--gpu", "t4", "--batch-size", 12, "--json")
    (found,) = json.loads(result.stdout)["searches"]
    assert (found["gpu"], found["batch_size"], found["tokens"]) == ("t4", 12, 32)
    best = found["plans"][0]
    assert Recipe.from_dict(best["recipe"]).batch_size == 12
    assert best["report"]["memory"]["peak_reserved_bytes"] > 0
    assert best["against_the_fastest"] == 1


def test_without_a_card_every_card_is_planned_for():
    result = invoke()
    for gpu in GPUS.values():
        assert gpu.title.split(" ", 1)[1] in result.stdout
    assert "The card with the least memory that will do: NVIDIA RTX 2080 Ti" in result.stdout


def test_nothing_fits_is_status_1_with_what_would():
    fixed = ("--weights", "float32", "--autocast", "none", "--checkpoint-every", 1)
    result = invoke("--model", "Qwen/Qwen3-Embedding-4B", "--gpu", "t4", *fixed)
    assert result.exit_code == 1
    assert "nothing fits" in result.stdout
    assert "on this card, another recipe (leave out --weights, --autocast" in result.stdout
    assert "What would fit: as it is, NVIDIA A10" in result.stdout


def test_data_decides_how_long_pairs_are(tmp_path):
    file = tmp_path / "pairs.tsv"
    file.write_text("sentence1\tsentence2\tlabel\n" + "花呗\t借呗\t0\n" * 20)
    result = invoke("--gpu", "t4", "--data", file, "--max-length", 512, "--json")
    (found,) = json.loads(result.stdout)["searches"]
    assert 2 < found["tokens"] <= found["mean_tokens"] == 8
    assert found["batch_size"] == 8
    assert found["plans"][0]["recipe"]["max_length"] == 512
    few = invoke("--gpu", "t4", "--data", file, "--batch-size", 64, "--max-length", 4)
    assert "20 of 20 pairs are longer than 4 tokens and are cut there" in few.stderr
    assert "has 20 pairs: a batch of 64 is planned for" in few.stderr
    whole = invoke("--gpu", "t4", "--data", file, "--padding", "max", "--json")
    assert json.loads(whole.stdout)["searches"][0]["tokens"] == 32


def test_none_of_the_largest_fits_is_status_1():
    large = ("--model", "Qwen/Qwen3-Embedding-8B", "--weights", "float32", "--autocast", "none")
    result = invoke("--gpu", "t4", "--largest", "batch-size", *large)
    assert result.exit_code == 1
    assert result.stdout.count("nothing fits") == 3


def test_the_largest_are_shown_by_kind():
    result = invoke("--gpu", "t4", "--largest", "batch-size", "--weights", "float32")
    assert "in one part" in result.stdout
    assert result.stdout.count("fp32") == 6
    assert "in parts (--micro-batches), a larger batch fits as well" in result.stdout
    rows = json.loads(invoke("--gpu", "t4", "--largest", "max-length", "--json").stdout)
    assert len(rows["largest"]) == 12
    assert all(row["max_length"] % 8 == 0 for row in rows["largest"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--largest", "weights", "--gpu", "t4"), "--largest is batch-size or max-length"),
        (("--largest", "batch-size"), "--largest needs a card: add --gpu"),
        (("--export", "plan"), "--export needs a card"),
        (("--gpu", "t4", "--largest", "batch-size", "--export", "x"), "leave out one of them"),
        (("--gpu", "rtx"), "fits several"),
        (("--gpu", "t4", "--max-length", 32776), "more than its 32768 positions"),
        (("--gpu", ""), "is not in the catalogue"),
        (("--gpu", "t4", "--attention", "flash_attention_2"), "predict with sdpa"),
        (("--gpu", "t4", "--micro-batches", 3), "batch_size 8 has no 3 equal parts"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(arguments, words):
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert words in result.stderr
    assert result.stderr.startswith("labkit: ")


def test_a_plan_is_exported(tmp_path, monkeypatch):
    asked = {}

    def export_recipe(recipe, pairs, folder, *, comment):
        asked.update(recipe=recipe, pairs=pairs, comment=comment)
        return [folder / "train_labkit.py"]

    monkeypatch.setattr("labkit.export.export_recipe", export_recipe)
    result = invoke("--gpu", "t4", "--export", tmp_path / "plan")
    assert result.exit_code == 0, result.output
    assert "train_labkit.py" in result.stderr
    assert "Predicted peak: " in asked["comment"]
    assert "synthetic ones: --data exports yours" in result.stderr
    assert asked["recipe"].optimizer == "adamw_fused"
