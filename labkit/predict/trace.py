"""One training step run without data: every block of memory it would take, in order.

The model is built on the ``meta`` device, its tensors become fake tensors on ``cpu``, and the
very code of the step runs on them: shapes, dtypes and lifetimes are real, values are not. A
block is born when an operation returns a new storage and dies when the last tensor on that
storage does, which is when PyTorch would hand its bytes back.
"""

import contextlib
import gc
import logging
import pkgutil
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.modules import module as hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.predict.cuda import cuda_behaviour, host_tensors, use_card_optimizer
from labkit.predict.gpus import Gpu
from labkit.predict.roofline import OpCosts, count_op
from labkit.report import PHASES

aten = torch.ops.aten
GEMMS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._addmm_activation}
WORKSPACE = "cublas workspace"


class TraceError(ValueError):
    """A step that cannot be run without data; the message says where it stopped and why."""


@dataclass(slots=True)
class Block:
    """What is known of one block of memory, its size aside.

    ``owner`` is one of ``report.OWNERS``; ``module`` the path of the module whose forward, or
    whose part of backward, made the block; empty outside of any.
    """

    op: str
    module: str
    owner: str


@dataclass(slots=True)
class Trace:
    """What a step does to memory: blocks made and freed, in order.

    Attributes:
        blocks: In the order in which they are made.
        sizes: Bytes asked for by each block, int64.
        events: ``i`` where block i is made, ``~i`` where it is freed, int64.
        phases: Index into ``report.PHASES`` of each event; 0 before the first step.
        modules: Where each event happened, as in ``Block.module``.
        step_starts: Index of the first event of each step.
        costs: Arithmetic and traffic of the operations of each step.
        cost_modules: Where each operation of the last step happened.
        emptied: Index of each event before which the step emptied the allocator's cache.
    """

    blocks: list[Block]
    sizes: np.ndarray
    events: np.ndarray
    phases: np.ndarray
    modules: list[str]
    step_starts: list[int]
    costs: list[OpCosts]
    cost_modules: list[str]
    emptied: list[int] = field(default_factory=list)


class Tracer(TorchDispatchMode):
    """Watches operations and notes the life of every storage.

    Args:
        workspace_bytes: Of the matrix library, taken at the first product of the forward
            thread and once more at the first of the backward thread, and kept. 0 on a CPU.
    """

    def __init__(self, workspace_bytes: int = 0) -> None:
        super().__init__()
        self.blocks: list[Block] = []
        self.sizes: list[int] = []
        self.events: list[int] = []
        self.phases: list[str] = []
        self.modules: list[str] = []
        self.step_starts: list[int] = []
        self.emptied: list[int] = []
        self.costs: list[list[tuple[int, int, str, str, str]]] = []  # of each step
        self.phase = "before"
        self.marked = False  # whether the step names its phases itself
        self.fresh = False  # whether no module was called yet in this step
        self.closed = False  # blocks that die later are no part of the trace
        self.failure: tuple | None = None  # error, operation, module: of what cannot be traced
        self._workspaces = [("", workspace_bytes), ("backward", workspace_bytes)]
        self._alive: dict[int, tuple[int, weakref.ref]] = {}  # by address of the storage
        self._inside: list[str] = []  # modules whose forward is running
        self._made_at: list[int] = []  # event at which each block was made
        self._updating = ""  # outside of modules: of the parameter an optimizer is at
        self._outside: set[int] = set()  # events that happened in no module, nor for one
        self._names: dict[int, str] = {}  # of modules, by id
        self._owners_of_nodes: dict[int, str] = {}  # autograd node → module of its forward
        self._homes: dict[int, str] = {}  # of parameters and buffers, by id

    # ---- where things happen

    def know(self, model: torch.nn.Module) -> None:
        """Learn the names of a model's modules and parameters."""
        for path, module in model.named_modules():
            self._names[id(module)] = path
            for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                self._homes.setdefault(id(tensor), path)

    def home_of(self, tensor: torch.Tensor) -> str:
        """The path of the module that holds a parameter or buffer."""
        return self._homes.get(id(tensor), "")

    def where(self) -> str:
        """The module that is at work: in forward by its call, in backward by its node."""
        if self._inside:
            return self._inside[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        if (variable := getattr(node, "variable", None)) is not None:  # a gradient arrives
            return self.home_of(variable)
        return self._owners_of_nodes.get(node._sequence_nr(), "")

    def begin_step(self) -> None:
        """The next step begins."""
        self.step_starts.append(len(self.events))
        self._updating = ""
        self.phase, self.fresh = "before", True
        self.costs.append([])
        self._owners_of_nodes.clear()

    def _enter(self, module, _inputs) -> None:
        self.fresh = False
        self._inside.append(
            self._names.get(id(module), self._inside[-1] if self._inside else "")
        )

    def _leave(self, *_) -> None:
        self._inside.pop()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the calls of modules and optimizers, too."""
        handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(self._before_update),
        ]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def mark(self, phase: str) -> None:
        """A step that names its phases says that one begins."""
        self.marked, self.phase = True, phase

    def _before_update(self, optimizer: torch.optim.Optimizer, *_) -> None:
        self._set_phase("optimizer")
        for group in optimizer.param_groups:
            self._own_gradients(group["params"])

    def _set_phase(self, phase: str) -> None:
        if not self.marked:
            self.phase = phase

    def empty_cache(self) -> None:
        """The step gives back to the driver what the allocator has cached."""
        self.emptied.append(len(self.events))

    # ---- what happens

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation and note the storages it made."""
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # asked for far more often than anything else
            return args[0].fake_device
        if func is aten._local_scalar_dense.default:
            return self._read(args[0])
        in_backward = torch._C._current_autograd_node() is not None
        from_nothing = not any(isinstance(arg, torch.Tensor) for arg in args)
        if in_backward:
            self._set_phase("backward")
        elif self.phase == "backward" or (self.phase == "before" and not from_nothing):
            self._set_phase("forward")
        where = self.where()
        if not in_backward:  # the operation's node, if it has one, was made just before
            self._owners_of_nodes.setdefault(torch._C._autograd._get_sequence_nr() - 1, where)
        if func.overloadpacket in GEMMS:
            self._take_workspace("backward" if in_backward else "", where)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self.failure = error, func, where
            raise
        for index, tensor in enumerate(_tensors(result)):
            if self.number_of(tensor) is None:
                is_input = self.fresh and from_nothing and tensor.dim() > 0
                home = where or self._home_of_result(args, result, index)
                self.add(tensor, str(func.overloadpacket), home, "inputs" * is_input)
        if not where:
            is_list = bool(args) and isinstance(args[0], list | tuple)
            self._updating = "" if is_list else self._home_of_result(args, result, 0)
        flops, moved_bytes, dtype = count_op(func, args, kwargs, result)
        if moved_bytes:
            # an optimizer's operation on lists is as many as the lists are long
            count = len(args[0]) if args and isinstance(args[0], list | tuple) else 1
            for index in range(count):
                home = where or self._home_of_result(args, args[0], index)
                part = (flops // count, moved_bytes // count, dtype, self.phase, home)
                self.costs[-1].append(part)
        return result

    def _read(self, tensor: torch.Tensor) -> float | int | bool:
        """The value that code asks a tensor for, when there are no values.

        Masks and checks ask whether all of something holds, or any: of a sound batch it does,
        and nothing is infinite or missing.
        """
        if tensor.dtype == torch.bool:
            return self.block_of(tensor).op == "aten.all"
        # neither 0 nor 1: optimizers divide by numbers that they read, and by 1 minus those
        return 0.5 if tensor.dtype.is_floating_point else 1

    def _home_of_result(self, args: tuple, result, index: int) -> str:
        """Outside of any module (in optimizers) a result belongs where its input does.

        That holds for each of a list of results; one made of a whole list belongs nowhere.
        """
        source = args[0] if args else None
        if isinstance(source, list | tuple):
            source = source[index] if isinstance(result, list | tuple) else None
        if isinstance(source, torch.Tensor) and (block := self.block_of(source)):
            return block.module
        return ""

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block that a tensor lives in."""
        number = self.number_of(tensor)
        return None if number is None else self.blocks[number]

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The number of that block."""
        entry = self._alive.get(tensor.untyped_storage()._cdata)
        return entry[0] if entry else None

    def add(self, tensor: torch.Tensor, op: str, where: str, owner: str) -> None:
        """Note a storage that is not known yet."""
        storage = tensor.untyped_storage()
        key, index = storage._cdata, len(self.blocks)

        def freed(_) -> None:
            if self.closed:
                return
            del self._alive[key]
            where = self.where()
            if not where and not self._updating:
                self._outside.add(len(self.events))
            self._event(~index, where or self._updating or block.module)

        block = Block(op, where, owner)
        self._alive[key] = index, weakref.ref(storage, freed)
        self._made_at.append(len(self.events))
        self.blocks.append(block)
        self.sizes.append(storage.nbytes())
        self._event(index, where)

    def _event(self, event: int, where: str) -> None:
        self.events.append(event)
        self.phases.append(self.phase)
        self.modules.append(where)

    def _take_workspace(self, thread: str, where: str) -> None:
        for entry in self._workspaces:
            if entry[0] == thread and entry[1]:
                self._workspaces.remove(entry)
                self._allocate(entry[1], WORKSPACE)
                return

    def _allocate(self, size_bytes: int, op: str) -> int:
        """Note a block that is no tensor's."""
        self._made_at.append(len(self.events))
        self.blocks.append(Block(op, "", "temporaries"))
        self.sizes.append(size_bytes)
        self._event(len(self.blocks) - 1, "")
        return len(self.blocks) - 1

    def warm_up(self, size_bytes: int) -> None:
        """Allocate and free a block, so that the next ones are cut from its segment."""
        self._event(~self._allocate(size_bytes, "warm-up"), "")

    def own(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Say whose the blocks are that outlive a step: gradients and optimizer state."""
        self._updating = ""
        self._own_gradients(model.parameters())
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self._assign(value, "optimizer_state", parameter)

    def _own_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self._assign(parameter.grad, "gradients", parameter)

    def _assign(self, tensor: torch.Tensor, owner: str, parameter: torch.nn.Parameter) -> None:
        """Say that a tensor's block belongs to a parameter, and was made for it."""
        number = self.number_of(tensor)
        if number is None or self.blocks[number].owner == owner:
            return
        block, home = self.blocks[number], self.home_of(parameter)
        block.owner, block.module = owner, home
        made_at = self._made_at[number]
        self.modules[made_at] = self.modules[made_at] or home

    def trace(self) -> Trace:
        """What was seen, as arrays."""
        self._finish_owners()
        self._sort_frees()
        return Trace(
            blocks=self.blocks,
            sizes=np.array(self.sizes, np.int64),
            events=np.array(self.events, np.int64),
            phases=np.array([PHASES.index(phase) for phase in self.phases], np.int8),
            modules=list(self.modules),
            step_starts=self.step_starts,
            costs=[
                OpCosts(
                    np.array([cost[0] for cost in step], np.int64),
                    np.array([cost[1] for cost in step], np.int64),
                    [cost[2] for cost in step],
                    [cost[3] for cost in step],
                )
                for step in self.costs
            ],
            cost_modules=[cost[4] for cost in self.costs[-1]],
            emptied=self.emptied,
        )

    def _sort_frees(self) -> None:
        """Put frees in a row, in one place, into the order in which the blocks were made.

        Autocast drops its copies of weights in another order each time. What is free afterwards
        is the same.
        """
        steps = np.searchsorted(self.step_starts, np.arange(len(self.events)), side="right")

        def row(at: int) -> tuple:
            if self.events[at] >= 0:
                return (at,)
            place = None if at in self._outside else self.modules[at]
            return place, self.phases[at], steps[at]

        for _, group in groupby(range(len(self.events)), key=row):
            start, *rest = group
            if rest:
                order = sorted((start, *rest), key=lambda at: ~self.events[at])
                self.events[start : rest[-1] + 1] = [self.events[at] for at in order]
                self.modules[start : rest[-1] + 1] = [self.modules[at] for at in order]

    def _finish_owners(self) -> None:
        """Of the rest, what is made in forward and outlives it is an activation."""
        stretch = np.cumsum(
            [a != b for a, b in zip(["", *self.phases], self.phases, strict=False)]
        )
        kept = {
            ~event
            for position, event in enumerate(self.events)
            if event < 0 and stretch[position] != stretch[self._made_at[~event]]
        } | (set(range(len(self.blocks))) - {~event for event in self.events if event < 0})
        for index, block in enumerate(self.blocks):
            if not block.owner:
                saved = index in kept and self.phases[self._made_at[index]] == "forward"
                block.owner = "activations" if saved else "temporaries"


def _tensors(result) -> list[torch.Tensor]:
    """The tensors that an operation returned."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, list | tuple):
        return [item for item in result if isinstance(item, torch.Tensor)]
    return []


def trace_step(
    build: Callable[[], tuple[torch.nn.Module, torch.optim.Optimizer, Callable]],
    gpu: Gpu | None = None,
    *,
    steps: int = 2,
    padded: bool = True,
    warm_up_bytes: int = 0,
) -> Trace:
    """Build a step without memory and run it without data.

    Args:
        build: Returns a model, its optimizer, and the step: a function that is handed ``mark``
            (which may name phases as they begin), makes its batch, and does forward, backward
            and update. Called with ``meta`` as the default device; the step runs on fake
            tensors whose device is ``cpu``.
        gpu: The card whose behaviour is put in; None for that of a CPU, with the last step's
            gradients gone before each step, as they are where bytes are measured.
        steps: How many; the optimizer's state exists from the second on.
        padded: Whether the batch holds padding: it decides the attention path.
        warm_up_bytes: Allocated and freed before the weights, which are then cut from them, as
            transformers does where it loads onto a device.

    Raises:
        TraceError: An operation's result depends on values, or it has no rule without them.
    """
    mode, tracer = FakeTensorMode(), Tracer(gpu.cublas_workspace_bytes if gpu else 0)
    gc.freeze()  # what is found among all objects is then only what the step is made of
    try:
        with torch.device("meta"):
            model, optimizer, step = build()
        tracer.know(model)
        if warm_up_bytes:
            tracer.warm_up(warm_up_bytes)
        _make_fake(model, mode, tracer)
    finally:
        gc.unfreeze()
    if gpu:
        use_card_optimizer(optimizer)
    collecting = gc.isenabled()
    gc.disable()  # or blocks in reference cycles would be freed at moments of its choosing
    try:
        with (
            _as_with_data(padded), cuda_behaviour(gpu) if gpu else _cpu_behaviour(),
            mock.patch("torch.cuda.empty_cache", tracer.empty_cache), mode, tracer.watching(),
        ):  # fmt: skip
            for _ in range(steps):
                tracer.begin_step()
                if gpu is None:
                    optimizer.zero_grad(set_to_none=True)
                step(tracer.mark)
                tracer.own(model, optimizer)
        for tensor in host_tensors(optimizer) if gpu else ():
            tracer.sizes[tracer.number_of(tensor)] = 0
        return tracer.trace()
    except Exception as error:
        if tracer.failure is None or tracer.failure[0] is not error:
            raise  # the step's own
        _, operation, where = tracer.failure
        reason = "its result depends on values"
        if not isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            reason = str(error).strip().splitlines()[0].rstrip(".")
        raise TraceError(
            f"the step cannot be run without data: {operation} in {where or 'the step itself'} "
            f"fails there ({reason}). Leave it out of the step, or use operations whose shapes "
            "are known beforehand."
        ) from error
    finally:
        tracer.closed = True
        if collecting:
            gc.enable()


@contextlib.contextmanager
def _cpu_behaviour() -> Iterator[None]:
    """Count the state of the random numbers that checkpointing keeps for each layer.

    On a card the host keeps it; on a CPU it is memory like any other.
    """
    state_bytes = torch.get_rng_state().numel()

    def get_state():
        return torch.empty(state_bytes, dtype=torch.uint8)

    with (
        mock.patch("torch.get_rng_state", get_state),
        mock.patch("torch.set_rng_state", _drop_state),
    ):
        yield


def _drop_state(state: torch.Tensor) -> None:
    """Keep no state alive; a Mock would, among the arguments it was called with."""


def _make_fake(model: torch.nn.Module, mode: FakeTensorMode, tracer: Tracer) -> None:
    """Turn every tensor on ``meta`` into a fake one on ``cpu`` and note it as a weight.

    In place, so that whatever holds a parameter (optimizer, closures) still holds it. Tensors
    that are no parameters or buffers of the model, such as a mask in an attribute, are found
    among the objects alive, those that the collector was told to leave out excepted.
    """
    gc.collect()
    own = dict.fromkeys(_in_order_of_moving(model))
    others = (
        thing for thing in gc.get_objects()
        if issubclass(type(thing), torch.Tensor) and thing.is_meta and thing not in own
    )  # fmt: skip
    for tensor in [*own, *others]:
        if not tensor.is_meta or isinstance(tensor, FakeTensor):
            continue
        fake = FakeTensor(mode, tensor.detach(), torch.device("cpu"))
        fake.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            fake._is_param = True
        torch.utils.swap_tensors(tensor, fake)
        del fake
        if tracer.block_of(tensor) is None:
            tracer.add(tensor, "weight", tracer.home_of(tensor), "weights")


def _in_order_of_moving(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers in the order in which ``module.to(device)`` moves them."""
    for child in module.children():
        yield from _in_order_of_moving(child)
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


@contextlib.contextmanager
def _as_with_data(padded: bool) -> Iterator[None]:
    """Let libraries take the path that they take when tensors have values."""
    with contextlib.ExitStack() as stack:
        for name, value in (
            # transformers takes other branches where it meets a fake tensor
            ("transformers.utils.import_utils.is_fake_tensor", lambda tensor: False),
            ("transformers.masking_utils.fast_all", lambda mask: not padded),
            # the scaler skips an update if it read an infinity
            ("torch.amp.GradScaler._maybe_opt_step", _always_step),
        ):
            if _has(name):
                stack.enter_context(mock.patch(name, value))
        # what a fake tensor cannot do is told by our error, not by a page of its own
        noise = logging.getLogger("torch._subclasses.fake_tensor")
        stack.enter_context(mock.patch.object(noise, "disabled", True))
        yield


def _has(name: str) -> bool:
    """Whether the installed version of a library has that name."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def _always_step(scaler, optimizer, state, *args, **kwargs):
    return optimizer.step(*args, **kwargs)
