"""The explorer: controls, and the picture that follows them."""

from html import escape
from pathlib import Path
from threading import RLock, Thread, Timer

import ipywidgets as widgets
from IPython.display import Javascript, display

from labkit.captions import checkpoint_words
from labkit.explorer_answer import answer
from labkit.explorer_measure import measure_here
from labkit.explorer_picture import message, picture
from labkit.explorer_setting import LARGEST_BATCH, LENGTHS, MODELS, PARTS, Setting
from labkit.predict.gpus import GPUS, find_gpu
from labkit.recipe import Recipe
from labkit.report import Report
from labkit.space import CHECKPOINTS, PRECISIONS

PATIENCE_SECONDS = 0.3  # an answer that takes longer is announced
WORKING = "Working out every step of this recipe on this card; that takes some seconds, once."
HERE = "this machine"  # an option whose value is None would count as nothing chosen
WIDTH = {"width": "auto"}
LOOK = {"layout": WIDTH, "style": {"description_width": "8em"}}


class Explorer(widgets.VBox):
    """Choose a recipe and a card, and see at once who holds the peak and whether it fits.

    A change of a control is one redraw. While one is drawn, the browser holds back what else a
    slider does and then sends the last of it: no picture of a position already left is in the
    way.

    Attributes:
        setting: What the controls say.
    """

    def __init__(self, setting: Setting) -> None:
        self._lock = RLock()  # a measurement ends in another thread
        self._settling = False
        self._here: dict[Recipe, tuple[Report, Report]] = {}
        self.setting = setting
        models = {Path(name).name: name for name in (*MODELS, setting.model)}
        cards = {gpu.title.split(" ", 1)[1]: name for name, gpu in GPUS.items()}  # no maker
        self._controls = {
            "model": _choice("Model", models),
            "gpu": _choice("Card", cards | {"This machine's CPU": HERE}),
            "precision": _choice("Precision", PRECISIONS),
            "checkpoint_every": _choice(
                "Checkpointing", {checkpoint_words(every): every for every in CHECKPOINTS}
            ),
            "micro_batches": _choice("Accumulation", PARTS),
            "batch_size": widgets.IntSlider(description="Batch size", **LOOK),
            "max_length": widgets.SelectionSlider(
                options=LENGTHS, description="Length", **LOOK
            ),
        }
        self._button = widgets.Button(description="Measure this recipe here", layout=WIDTH)
        self._status = widgets.HTML()
        self._picture = widgets.HTML()
        *choices, batch, length = self._controls.values()
        columns = {
            "grid_template_columns": "repeat(auto-fit, minmax(min(100%, 280px), 1fr))",
            "grid_gap": "2px 12px",
        }
        measuring = widgets.HBox([self._button, self._status], layout={"flex_flow": "row wrap"})
        super().__init__(
            [widgets.GridBox(choices, layout=columns), batch, length, measuring, self._picture],
            layout={"max_width": "960px"},
        )
        self.add_class("labkit-explorer")
        self._show_setting()
        self._draw()
        for control in self._controls.values():
            control.observe(self._follow, "value")
        self._button.on_click(self._start_measuring)

    def _show_setting(self) -> None:
        """Put every control where the setting says; the batch goes in steps of the parts."""
        parts, batch = self.setting.micro_batches, self._controls["batch_size"]
        with batch.hold_trait_notifications():
            batch.min, batch.max, batch.step = parts, LARGEST_BATCH, parts
        gpu = self.setting.gpu
        values = vars(self.setting) | {"gpu": gpu.name if gpu else HERE}
        for name, control in self._controls.items():
            control.value = values[name]

    def _follow(self, _) -> None:
        """Take over what a control says, and redraw once."""
        with self._lock:
            if self._settling:
                return  # a control that is put into its place here
            values = {name: control.value for name, control in self._controls.items()}
            parts = values["micro_batches"]
            values["batch_size"] = max(parts, round(values["batch_size"] / parts) * parts)
            values["gpu"] = GPUS.get(values["gpu"])
            self.setting = Setting(**values)
            self._settling = True
            self._show_setting()
            self._settling = False
            if not self._button.disabled:
                self._say("")  # what was said of another setting
            self._draw()

    def _draw(self) -> None:
        """Redraw picture and words in one message, so that nothing flickers."""
        waiting = Timer(PATIENCE_SECONDS, self._say_working)
        waiting.start()
        try:
            content = picture(answer(self.setting), self._here.get(self.setting.recipe))
        except ValueError as error:
            content = message(str(error))
        finally:
            waiting.cancel()
            waiting.join()
        self._picture.value = content

    def _say_working(self) -> None:
        self._picture.value = message(WORKING)

    def _start_measuring(self, _) -> None:
        """Measure in another thread: the sliders go on."""
        self._button.disabled = True
        Thread(target=self._measure, args=(self.setting.recipe,), daemon=True).start()

    def _measure(self, recipe: Recipe) -> None:
        try:
            self._here[recipe] = measure_here(recipe, self._say)
            self._say("Measured: the bars below show it while the controls stay as they were.")
        except ValueError as error:
            self._say(str(error))
        finally:
            self._button.disabled = False
        with self._lock:
            self._draw()

    def _say(self, text: str) -> None:
        self._status.value = escape(text)

    def _repr_mimebundle_(self, **options) -> dict:
        """The controls, and for an export, which has no kernel, the picture as it is now."""
        return super()._repr_mimebundle_(**options) | {"text/html": self._picture.value}

    def show(self) -> None:
        """Display the explorer, and what makes it speak to screen readers."""
        script = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
        display(Javascript(script), self)


def _choice(description: str, options) -> widgets.Dropdown:
    return widgets.Dropdown(description=description, options=options, **LOOK)


def explore(model: str | None = None, gpu: str | None = None) -> None:
    """Show the explorer: sliders, choices, and who holds the peak.

    Args:
        model: A geometry, a local folder, a ``config.json`` or a hub id.
        gpu: A card, anything that ``find_gpu`` understands.
    """
    chosen = {"model": model, "gpu": find_gpu(gpu) if gpu else None}
    Explorer(Setting(**{name: value for name, value in chosen.items() if value})).show()
