"""Which module of a model is at work, in forward and in backward."""

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.modules import module as hooks


class Whereabouts:
    """Follows the calls of a model's modules, and remembers them for backward.

    An autograd node has a sequence number. It is made just before its operation runs, so the
    number in force then is the node's, and tells in backward which module's forward it was.

    Attributes:
        called: Whether any module was called since ``begin_step``.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.called = False
        self._names: dict[int, str] = {}  # of modules, by id
        self._homes: dict[int, str] = {}  # of parameters and buffers, by id
        self._inside: list[str] = []  # modules whose forward is running
        self._modules_of_nodes: dict[int, str] = {}
        for path, module in model.named_modules():
            self._names[id(module)] = path
            for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                self._homes.setdefault(id(tensor), path)

    def home_of(self, tensor: torch.Tensor) -> str:
        """The path of the module that holds a parameter or buffer."""
        return self._homes.get(id(tensor), "")

    def begin_step(self) -> None:
        """The next step begins."""
        self.called = False
        self._modules_of_nodes.clear()

    def now(self) -> str:
        """The module that is at work; empty outside of any."""
        if self._inside:
            return self._inside[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        if (variable := getattr(node, "variable", None)) is not None:  # a gradient arrives
            return self.home_of(variable)
        return self._modules_of_nodes.get(node._sequence_nr(), "")

    def remember(self, where: str) -> None:
        """An operation of forward runs: its node, if it has one, was made just before."""
        number = torch._C._autograd._get_sequence_nr() - 1
        self._modules_of_nodes.setdefault(number, where)

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Follow the calls of modules."""
        handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: torch.nn.Module, _inputs) -> None:
        self.called = True
        outer = self._inside[-1] if self._inside else ""
        self._inside.append(self._names.get(id(module), outer))

    def _leave(self, *_) -> None:
        self._inside.pop()
