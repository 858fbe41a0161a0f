"""What the pages of docs/ show is what the records say."""

import importlib
import json
import re
from pathlib import Path

import pytest

from labkit.machine import PROJECT
from labkit.predict.published import compare_published
from labkit.recipe import Recipe
from labkit.reference import REFERENCE, VALIDATIONS
from labkit.space import CHECKPOINTS, kinds
from labkit.validation import load_validation
from labkit.validation_words import published_markdown, validation_markdown

DOCS = PROJECT / "docs"
PAGE = (DOCS / "prediction.md").read_text(encoding="utf-8")
PAGES = "\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))


def block(name):
    """What stands between the two comments of that name."""
    found = re.search(rf"<!-- {name}: .*? -->\n(.*?)<!-- end of {name} -->", PAGES, re.DOTALL)
    assert found, f"no block {name}"
    return found[1]


def test_the_errors_are_those_of_the_kept_validations():
    kept = [load_validation(path) for path in sorted(REFERENCE.glob(VALIDATIONS))]
    assert block("validate") == "\n".join(validation_markdown(each) for each in kept)


def test_the_published_figures_are_compared_as_shown():
    assert block("published") == published_markdown(compare_published())


@pytest.mark.parametrize("name", ["switches", "peers", "quality"])
def test_tables_of_speed_are_those_of_the_kept_records(name, monkeypatch):
    module = "peers_table" if name == "peers" else name
    if name == "peers":
        for package in ("accelerate", "sentence_transformers", "datasets"):
            pytest.importorskip(package, reason="the peers: requirements-dev.txt")
    monkeypatch.syspath_prepend(PROJECT / "bench")
    markdown = importlib.import_module(module).markdown
    kept = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((PROJECT / "data" / "bench").glob(f"*-{name}.json"))
    ]
    assert kept
    assert block(name).strip() == "\n".join(map(markdown, kept)).strip()


def test_the_example_runs(tmp_path, monkeypatch):
    from transformers import GPT2Config

    GPT2Config(
        n_layer=1, n_embd=8, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0
    ).save_pretrained(tmp_path)
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    config = str(tmp_path / "config.json")
    code = code.replace("path/to/config.json", config).replace("zeros(8, 512", "zeros(2, 8")
    names = {}
    exec(code, names)
    report = names["report"]
    assert report.fit.fits
    assert report.memory.peak_reserved_bytes > report.memory.peak_allocated_bytes > 0


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"`((?:labkit|data|tests|bench)/[\w./-]+)`", PAGES)))
)
def test_files_that_are_named_exist(name):
    assert (PROJECT / name).exists()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(\w+\.py)`", PAGE))))
def test_modules_that_are_named_exist(name):
    assert (Path(PROJECT) / "labkit" / "predict" / name).exists()


def test_links_lead_to_headings_of_the_pages():
    links = re.findall(r"\]\(([\w.-]*)#([\w-]+)\)", PAGES)
    assert links
    for page, anchor in links:
        headings = re.findall(r"^#+ (.*)$", (DOCS / page).read_text(encoding="utf-8"), re.M)
        assert anchor in {heading.lower().replace(" ", "-") for heading in headings}, anchor


def test_the_searched_values_are_those_of_the_space():
    planning = (DOCS / "planning.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", planning, re.M))
    assert table.keys() == {"weights", "autocast", "checkpoint_every", "micro_batches"}
    assert table["checkpoint_every"] == ", ".join(map(str, CHECKPOINTS))
    found = kinds(Recipe(), "bfloat16")
    assert {(r.weights, r.autocast) for r in found} == {
        (weights, autocast)
        for weights in ("float32", "bfloat16")
        for autocast in ("none", "bfloat16")
    }
