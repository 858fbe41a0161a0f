import ast
from pathlib import Path

import pytest

import labkit

PACKAGE = Path(labkit.__file__).parent

# A module imports only modules that stand before it; each line is one layer of the design.
LAYERS = """
recipe report interruption
machine hub
precision model_source packing packed_model dropout model trainable compiling
rows data subsets synthetic tokenizer token_cache order tokens shapes paddings
step memory trial measure pretrain_data pretrain
quality adapter_files adapter checkpoint history schedule loop training
gradients lora_candidates
predict.gpus space predict.roofline predict.counting predict.attention
predict.packed_attention predict.cuda predict.events predict.log predict.whereabouts
predict.tracer predict.fake predict.trace
predict.segments predict.allocator predict.plain_replay predict.peaks
predict.stack predict.layers predict.polynomials predict.timeline predict.recorded
predict.recipe_step predict.recipe_timeline predict.recipe_trace
predict.prediction predict.recording predict.outlook predict.local_card
predict.published_gpt2 predict.published_liger predict.published_steps predict.published
waterfall captions forecast_words lora_words lora_tables
canvas plots padding_plots lora_plots predicted_plots forecast_plots overview
explorer_setting explorer_answer explorer_words explorer_curve explorer_picture explorer_plots
records table summary reference validation validation_words validator
export
budget race exactness tuning_space tuning_forecast
tuning_record tuning_entrant tuning_search tuning_proof tuning
job limits plan plan_words findings forecast_findings exercises lora_exercise
run_folder forecast lora_trials cells notebook explorer_measure explorer
page exploration lora_choice predicted_page execution progress resume runner
cli_options cli_output cli_pretrain cli_data cli_plan_output cli_plan
cli_train_output cli_train cli_tune_output cli_tune
cli_predict cli_explore cli_validate cli __main__
"""
ORDER = LAYERS.split()


def imported_modules(path):
    """The modules of labkit that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "labkit":
            names = [f"labkit.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [node.module]
        else:
            continue
        found |= {name[len("labkit.") :] for name in names if name.startswith("labkit.")}
    return found


def test_every_module_has_its_place():
    assert sorted(ORDER) == sorted(
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
        if path.stem != "__init__"
    )


@pytest.mark.parametrize("module", ORDER)
def test_imports_point_down(module):
    allowed = set(ORDER[: ORDER.index(module)])
    path = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    assert imported_modules(path) <= allowed


def test_the_test_sees_an_import_inside_a_function(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("def f():\n    from labkit import cli\n    import labkit.page\n")
    assert imported_modules(path) == {"cli", "page"}
