"""Timelines that come with the lab, so that the built-in models are answered at once.

``data/timelines`` holds an archive for each built-in model and each kind of card: the patterns
that ``labkit data timelines`` fitted for all recipes of ``labkit.space``, a member for each. A
pattern is used only with the versions of the libraries that it was fitted with.
"""

import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from lzma import LZMAError
from pathlib import Path
from zipfile import ZIP_LZMA, BadZipFile, ZipFile, ZipInfo

import numpy as np
from transformers import PretrainedConfig

from labkit.data import DATA_FOLDER
from labkit.machine import installed_version
from labkit.model_source import SIZES, geometry
from labkit.predict.events import Block, Trace
from labkit.predict.layers import Growth
from labkit.predict.polynomials import Polynomials
from labkit.predict.roofline import OpCosts
from labkit.predict.stack import Stack
from labkit.predict.timeline import Pattern

logger = logging.getLogger(__name__)

FOLDER = DATA_FOLDER / "timelines"
LIBRARIES = ("torch", "transformers", "peft")
VERSIONS = "versions.json"
# Fields of a config that change no byte and no operation.
WITHOUT_EFFECT = {
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id",
    "initializer_range", "pad_token_id", "rms_norm_eps", "transformers_version",
}  # fmt: skip


@dataclass(frozen=True)
class Recorded:
    """A pattern that was fitted for one recipe of one model on one kind of card.

    ``trained`` counts the parameters that are trained; ``one_row`` says whether the pattern was
    found to hold for parts of one row, too.
    """

    pattern: Pattern
    trained: dict[str, int]
    one_row: bool


def versions() -> dict[str, str]:
    """The libraries that decide what a step does, without the tag of their build."""
    return {name: (installed_version(name) or "").partition("+")[0] for name in LIBRARIES}


def built_in_model(config: PretrainedConfig) -> str | None:
    """The built-in model that has the same shapes, whatever it is called."""
    shapes = _shapes(config)
    return next((name for name in SIZES if _shapes(geometry(name)) == shapes), None)


def file_of(model: str, gpu: str) -> Path:
    """Where the patterns of a built-in model on a kind of card are."""
    return FOLDER / f"{model.rpartition('/')[2].lower()}-{gpu}.zip"


def find_recorded(config: PretrainedConfig, gpu: str, key: dict) -> Recorded | None:
    """The pattern with that key, None where there is none that can be used."""
    model = built_in_model(config)
    file = model and file_of(model, gpu)
    if not file or not file.is_file():
        return None
    try:
        with ZipFile(file) as archive:
            if json.loads(archive.read(VERSIONS)) != versions():
                return None
            if (name := _member(key)) not in archive.namelist():
                return None
            return _from_plain(json.loads(archive.read(name)))
    except (BadZipFile, LZMAError, EOFError, KeyError, ValueError) as error:
        logger.warning(
            "%s is damaged (%s), so its timelines are fitted anew; labkit data timelines "
            "writes it again.", file, type(error).__name__,
        )  # fmt: skip
        return None


def save_recorded(file: Path, entries: Iterable[tuple[dict, Recorded]]) -> None:
    """Write patterns with their keys; the same ones give the same bytes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    with ZipFile(unfinished, "w") as archive:
        documents = {
            _member(key): to_plain(recorded) | {"key": key} for key, recorded in entries
        }
        for name, document in (documents | {VERSIONS: versions()}).items():
            text = json.dumps(document, separators=(",", ":"))
            archive.writestr(ZipInfo(name), text, ZIP_LZMA)
    unfinished.replace(file)


def _member(key: dict) -> str:
    """The name of a pattern in its archive."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16] + ".json"


def _shapes(config: PretrainedConfig) -> dict:
    return {k: v for k, v in config.to_dict().items() if k not in WITHOUT_EFFECT}


def to_plain(recorded: Recorded) -> dict:
    """Plain values for JSON."""
    pattern = recorded.pattern
    trace, (costs,) = pattern.trace, pattern.trace.costs
    return {
        "blocks": [[block.op, block.module, block.owner] for block in trace.blocks],
        "events": trace.events.tolist(),
        "phases": trace.phases.tolist(),
        "modules": trace.modules,
        "step_starts": trace.step_starts,
        "cost_dtypes": costs.dtypes,
        "cost_phases": costs.phases,
        "cost_modules": trace.cost_modules,
        **{name: _lists(getattr(pattern, name)) for name in ("sizes", "flops", "moved_bytes")},
        "stack": asdict(pattern.stack),
        "growth": pattern.growth and _lists(pattern.growth),
        "trained": recorded.trained,
        "one_row": recorded.one_row,
    }


def _from_plain(plain: dict) -> Recorded:
    """The value that ``to_plain`` gave."""
    nothing = np.zeros(len(plain["cost_dtypes"]), np.int64)  # a pattern's own costs are sums
    trace = Trace(
        blocks=[Block(*block) for block in plain["blocks"]],
        sizes=np.zeros(len(plain["blocks"]), np.int64),
        events=np.array(plain["events"], np.int64),
        phases=np.array(plain["phases"], np.int8),
        modules=plain["modules"],
        step_starts=plain["step_starts"],
        costs=[OpCosts(nothing, nothing, plain["cost_dtypes"], plain["cost_phases"])],
        cost_modules=plain["cost_modules"],
    )
    sums = {
        name: Polynomials(**_arrays(plain[name])) for name in ("sizes", "flops", "moved_bytes")
    }
    growth = plain["growth"] and Growth(**_arrays(plain["growth"]))
    pattern = Pattern(trace, **sums, stack=Stack(**plain["stack"]), growth=growth)
    return Recorded(pattern, plain["trained"], plain["one_row"])


def _lists(arrays: Polynomials | Growth) -> dict[str, list]:
    return {name: array.tolist() for name, array in asdict(arrays).items()}


def _arrays(lists: dict[str, list]) -> dict[str, np.ndarray]:
    return {name: np.array(values) for name, values in lists.items()}
