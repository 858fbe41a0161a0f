"""Watches the operations of a step and notes the life of every storage."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.predict.counting import count_op
from labkit.predict.events import WORKSPACE, Block
from labkit.predict.log import Log
from labkit.predict.whereabouts import Whereabouts

aten = torch.ops.aten
GEMMS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._addmm_activation}


class Tracer(TorchDispatchMode):
    """Writes a log of the blocks that operations make.

    A storage is known by its address as long as it lives; a weak reference tells its end.

    Args:
        model: Whose modules tell where things happen.
        workspace_bytes: Of the matrix library, taken at the first product of the forward
            thread and once more at the first of the backward thread, and kept. 0 on a CPU.

    Attributes:
        failure: Error, operation and module of what could not be done without data.
        closed: Blocks that die from now on are no part of the trace.
    """

    def __init__(self, model: torch.nn.Module, workspace_bytes: int = 0) -> None:
        super().__init__()
        self.log, self.places = Log(), Whereabouts(model)
        self.failure: tuple[Exception, torch._ops.OpOverload, str] | None = None
        self.closed = False
        self._model = model
        self._names_phases = False  # the step says itself which phase it is in
        self._workspaces = {"forward": workspace_bytes, "backward": workspace_bytes}
        self._alive: dict[int, tuple[int, weakref.ref]] = {}  # address → number of the block
        self._updating = ""  # outside of modules: where the parameter is that is updated

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follow operations, modules and optimizers."""
        handle = register_optimizer_step_pre_hook(self._before_update)
        try:
            with self.places.following(), self:
                yield
        finally:
            handle.remove()

    def begin_step(self) -> None:
        """The next step begins."""
        self._updating = ""
        self.log.begin_step()
        self.places.begin_step()

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step is over: say whose the blocks are that outlive it."""
        self._updating = ""
        self._own_gradients(self._model.parameters())
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self._assign(value, "optimizer_state", parameter)

    def mark(self, phase: str) -> None:
        """A step that names its phases says that one begins."""
        self._names_phases, self.log.phase = True, phase

    def _set_phase(self, phase: str) -> None:
        if not self._names_phases:
            self.log.phase = phase

    def _before_update(self, optimizer: torch.optim.Optimizer, *_) -> None:
        self._set_phase("optimizer")
        for group in optimizer.param_groups:
            self._own_gradients(group["params"])

    def _own_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self._assign(parameter.grad, "gradients", parameter)

    def _assign(self, tensor: torch.Tensor, owner: str, parameter: torch.nn.Parameter) -> None:
        number = self.number_of(tensor)
        if number is not None:
            self.log.assign(number, owner, self.places.home_of(parameter))

    # ---- blocks

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The number of the block that a tensor lives in."""
        entry = self._alive.get(tensor.untyped_storage()._cdata)
        return entry[0] if entry else None

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """That block."""
        number = self.number_of(tensor)
        return None if number is None else self.log.blocks[number]

    def add(self, tensor: torch.Tensor, op: str, where: str, owner: str) -> None:
        """Note the storage of a tensor, unless it is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        number = self.log.make(storage.nbytes(), op, where, owner)

        def freed(_) -> None:
            if not self.closed:
                del self._alive[key]
                self.log.free(number, self.places.now() or self._updating)

        self._alive[key] = number, weakref.ref(storage, freed)

    def add_weight(self, tensor: torch.Tensor) -> None:
        """Note a tensor that was there before the first step."""
        self.add(tensor, "weight", self.places.home_of(tensor), "weights")

    def warm_up(self, size_bytes: int) -> None:
        """Allocate and free a block, so that the next ones are cut from its segment."""
        self.log.free(self.log.make(size_bytes, "warm-up", "", "temporaries"), "")

    # ---- operations

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
        elif self.log.phase == "backward" or (self.log.phase == "before" and not from_nothing):
            self._set_phase("forward")
        where = self.places.now()
        if not in_backward:
            self.places.remember(where)
        if func.overloadpacket in GEMMS:
            workspace_bytes = self._workspaces.pop("backward" if in_backward else "forward", 0)
            if workspace_bytes:
                self.log.make(workspace_bytes, WORKSPACE, "", "temporaries")
        try:
            result = func(*args, **kwargs)
            made = _tensors(result)
        except Exception as error:
            self.failure = error, func, where
            raise
        for index, tensor in enumerate(made):
            is_input = from_nothing and not where and not self.places.called and tensor.dim()
            home = where or self._home_of_result(args, result, index)
            self.add(tensor, str(func.overloadpacket), home, "inputs" if is_input else "")
        if not where:
            is_list = bool(args) and isinstance(args[0], list | tuple)
            self._updating = "" if is_list else self._home_of_result(args, result, 0)
        self._count(func, args, kwargs, result, where)
        return result

    def _count(self, func, args: tuple, kwargs: dict, result, where: str) -> None:
        """Note what an operation costs; one on lists is as many as the lists are long."""
        flops, moved_bytes, dtype = count_op(func, args, kwargs, result)
        if moved_bytes:
            parts = len(args[0]) if args and isinstance(args[0], list | tuple) else 1
            for index in range(parts):
                home = where or self._home_of_result(args, args[0], index)
                self.log.count(flops // parts, moved_bytes // parts, dtype, home)

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


def _tensors(result) -> list[torch.Tensor]:
    """The tensors that an operation returned.

    Raises:
        TypeError: One is sparse.
    """
    results = result if isinstance(result, list | tuple) else [result]
    tensors = [item for item in results if isinstance(item, torch.Tensor)]
    if any(tensor.layout != torch.strided for tensor in tensors):
        raise TypeError("a sparse result has no block of its own")
    return tensors
