"""What gives a model its first values: calls of its own code, and which tensors each of them writes, found on meta.

building a GPT-2        c_proj.reset_parameters?   _init_weights(c_proj)   _init_weights(attn)
writes c_proj.weight             ✓                        ✓                    ✓  (as one of the residual path)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar._torch import written_operands
from autopar.errors import WeightsError
from autopar.runtime._torch import TorchDispatchMode, flatten, storage_key, truncated_normals_shown
from autopar.runtime.birth.draws import SCALAR, nothing_of
from autopar.runtime.birth.slots import put, replaced, slots_of, stand_in

Initialise = Callable[[nn.Module], object]
# By which a module without arguments initialises what it holds, in torch, torchvision and torchtitan.
_OWN = ("reset_parameters", "_reset_parameters", "init_weights", "_init_weights")
# What transformers' models, and many written like them, have for all modules inside of them.
_FOR_MODULES = "_init_weights"
# They give all of what they write into another value, whatever it was.
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "exponential_", "bernoulli_", "log_normal_", "cauchy_", "eye"}
_POINTWISE = _OVERWRITES | {"mul_", "add_", "sub_", "div_", "neg_", "clamp_", "clamp_min_", "clamp_max_", "erfinv_", "exp_", "sqrt_"}
# They read the shape of their operand alone.
_CREATES = {
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
}


@dataclass(frozen=True)
class Initialiser:
    """One call: `name` is the method, of the module at `path`, as an error would name it."""

    path: str
    name: str
    run: Callable[[], object]

    def __str__(self) -> str:
        return f"{self.name} of {self.path or 'the model'}"


@dataclass
class Effect:
    """What a call does to the slots of the model, by name.

    touched      those that it reads or writes; written: those that it writes
    overwritten  those of which no value from before the call is left, or read
    read         those of which more is read than element by element, to write that element
    joined       pairs (a, b): what is written to a depends on the value of b
    """

    touched: set[str] = field(default_factory=set[str])
    written: set[str] = field(default_factory=set[str])
    overwritten: set[str] = field(default_factory=set[str])
    read: set[str] = field(default_factory=set[str])
    joined: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])


def initialisers_of(model: nn.Module, also: Initialise | None = None) -> list[Initialiser]:
    """What building `model` would call, in order: for each module, children first, its own `reset_parameters` (or what it has in place of
    it), then `_init_weights(module)` of the innermost module around it that has one for others, then `also(module)`."""
    found: list[Initialiser] = []
    seen: set[int] = set()

    def visit(module: nn.Module, path: str, around: Initialise | None) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        around = _for_modules(module) or around
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name, around)
        for name in _OWN[:2] if around else _OWN:
            if hasattr(type(module), name) and _num_required(getattr(module, name)) == 0:
                found.append(Initialiser(path, name, getattr(module, name)))
        for function in (around, also):
            if function is not None:
                found.append(Initialiser(path, getattr(function, "__name__", "init"), partial(function, module)))

    visit(model, "", None)
    return found


def _for_modules(module: nn.Module) -> Initialise | None:
    # Of the class: a wrapper that hands on the names of what it wraps has none of its own.
    if not hasattr(type(module), _FOR_MODULES):
        return None
    method = getattr(module, _FOR_MODULES)
    return method if _num_required(method) == 1 else None


def _num_required(method: Any) -> int:
    """How many arguments a call must give; -1 where they cannot be positional."""
    if not callable(method):
        return -1
    parameters = inspect.signature(method).parameters.values()
    required = [each for each in parameters if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    return -1 if any(each.kind is each.KEYWORD_ONLY for each in required) else len(required)


def effects_of(model: nn.Module, calls: Sequence[Initialiser]) -> list[Effect]:
    """What each call does, tried on meta: nothing is computed, and the model stays as it is. Tied tensors are apart while it is tried.

    A value that Python asks for is 0, and what is written after that depends on it. Raises `WeightsError` for a call that fails like this.
    """
    found = []
    stand_ins = {name: stand_in(tensor, "meta") for name, tensor in slots_of(model).items()}
    with replaced(model, stand_ins), torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        for call in calls:
            recorder = _Recorder(stand_ins)
            try:
                with recorder, truncated_normals_shown():
                    call.run()
            except Exception as error:  # whatever the user's code raises
                raise WeightsError(
                    f"{call} cannot be tried without values: {type(error).__name__}: {error}. Initialise the model yourself, "
                    "model.to_empty and its own functions, or from files: weights=folder"
                ) from error
            found.append(recorder.effect)
            _note_replaced(model, stand_ins, recorder.effect)
    return found


def _note_replaced(model: nn.Module, stand_ins: Mapping[str, torch.Tensor], effect: Effect) -> None:
    """A call may set another tensor in place of writing into the one that is there."""
    set_anew = {name for name, tensor in slots_of(model).items() if name in stand_ins and tensor is not stand_ins[name]}
    effect.touched |= set_anew
    effect.written |= set_anew
    effect.overwritten |= set_anew
    for name in set_anew:
        put(model, name, stand_ins[name])


class _Recorder(TorchDispatchMode):
    """Notes which slots the ops read and write, also through views, `.data` and values in between."""

    def __init__(self, stand_ins: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.effect = Effect()
        self._names = {storage_key(tensor): name for name, tensor in stand_ins.items()}
        self._sizes = {name: tensor.numel() for name, tensor in stand_ins.items()}
        # By memory in between: from which slots its values come.
        self._sources: dict[int, frozenset[str]] = {}
        self._alive: list[torch.Tensor] = []
        # On which slots it depends what is called from now on.
        self._asked = frozenset[str]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op is SCALAR and args[0].is_meta:
            self._asked |= self._from(args[0])
            self.effect.touched |= self._asked
            self.effect.read |= self._asked
            return nothing_of(args[0])
        result = op(*args, **kwargs)
        name = op.overloadpacket.__name__
        written = written_operands(op, args, kwargs)
        operands = [each for each in _tensors((args, kwargs)) if not any(each is other for other in written)]
        made = [each for each in _tensors(result) if not any(each is other for other in written)]
        is_view = not written and bool(made) and {storage_key(each) for each in made} <= {storage_key(each) for each in operands}
        if is_view or name in _CREATES:
            return result
        sources = frozenset[str]().union(*map(self._from, operands))
        sources |= frozenset[str]().union(*map(self._from, written)) if name not in _OVERWRITES else frozenset()
        self.effect.read |= sources if name not in _POINTWISE else frozenset().union(*map(self._from, operands))
        for tensor in written:
            self._write(tensor, sources | self._asked, name in _OVERWRITES)
        self.effect.touched |= sources
        for tensor in made:
            self._remember(tensor, sources)
        return result

    def _from(self, tensor: torch.Tensor) -> frozenset[str]:
        key = storage_key(tensor)
        return frozenset((self._names[key],)) if key in self._names else self._sources.get(key, frozenset())

    def _write(self, tensor: torch.Tensor, sources: frozenset[str], overwrites: bool) -> None:
        name = self._names.get(storage_key(tensor))
        if name is None:
            self._remember(tensor, sources)
            return
        if overwrites and name not in self.effect.touched and name not in sources - self._asked and tensor.numel() == self._sizes[name]:
            self.effect.overwritten.add(name)
        self.effect.touched.add(name)
        self.effect.written.add(name)
        self.effect.joined |= {(name, source) for source in sources if source != name}

    def _remember(self, tensor: torch.Tensor, sources: frozenset[str]) -> None:
        key = storage_key(tensor)
        if sources and key not in self._names:
            self._sources[key] = self._sources.get(key, frozenset()) | sources
            self._alive.append(tensor)  # no other memory gets this key


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)]
