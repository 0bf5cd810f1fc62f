"""What `torch.autocast` does to a call: which operands it casts, found by asking torch itself, not from a list of ours.

torch's lists differ between devices and releases, and composite ops that are on none are cast inside (`einsum` on a CPU). So the call
is run on fake tensors with autocast and again with the casts written out, and the ops that reach the kernels are compared:

    linear(x, w)  under autocast      _to_copy(x), _to_copy(w), t, mm
    linear(x', w') with casts         _to_copy(x), _to_copy(w), t, mm        equal: these casts are what autocast does

Where no casts of the operands make both alike, the call is replaced by the ops that it consists of, casts among them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from autopar._torch import (
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    attribute_set,
    fake_errors_quiet,
    has_kernel,
    pytree,
    schema_of,
    without_onednn,
)
from autopar.ir.arguments import call_of

aten = torch.ops.aten

_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
# torch rounds log-probabilities to the lower dtype between the two halves of it. Losses are in float32 here.
_IN_FLOAT32 = frozenset({aten.cross_entropy_loss.default})
# Ops of one kind of device, which a graph for all must not have.
_OF_A_DEVICE = ("cudnn", "miopen", "mkldnn", "flash", "efficient", "cuda", "thnn")


@dataclass(frozen=True)
class Autocast:
    """An enabled `torch.autocast` for tensors on `device`, "cpu" or "cuda", in `dtype`; one that `caches` casts a parameter once."""

    device: str
    dtype: torch.dtype
    caches: bool = True

    @staticmethod
    def around(device: str) -> Autocast | None:
        """The one that is enabled now for tensors on `device`, if one is. For "meta", which stands for any device, that of a GPU first."""
        for kind in ("cuda", "cpu") if device == "meta" else (device,):
            if torch.is_autocast_enabled(kind):
                return Autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
        return None


@dataclass(frozen=True)
class Event:
    """An op that reaches a kernel. Tensors are numbers in its (flat) arguments: operands of the call first, then results in order."""

    target: OpOverload
    arguments: tuple[Any, ...]
    structure: Any
    results: tuple[int, ...]
    is_tuple: bool


@dataclass(frozen=True)
class Tensor:
    """A tensor among the arguments of an `Event`."""

    number: int


@dataclass(frozen=True)
class Casts:
    """What autocast does to a call: dtypes of operands by their place among the flat arguments, a `dtype=` that it adds; or, where that
    does not say it, the `events` the call consists of, and the tensors that it returns."""

    operands: Mapping[int, torch.dtype] = field(default_factory=dict[int, torch.dtype])
    dtype: torch.dtype | None = None
    events: tuple[Event, ...] = ()
    returned: Any = None


NOTHING = Casts()


class CastInsideError(Exception):
    """A call that autocast changes in a way that no graph for all devices has."""


class CastsOfCalls:
    """`Casts` by call, each kind of call looked into once."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Hashable, Casts] = {}

    def of(self, target: Callable[..., Any], args: Any, kwargs: Any, autocast: Autocast) -> Casts:
        """`args` and `kwargs` with fake tensors. Raises `CastInsideError`."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        kinds = tuple((leaf.dtype, leaf.ndim) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
        # Shapes decide nothing but what a call that is taken apart consists of.
        key = target, kinds, str(structure), autocast
        if key not in self._known:
            found = _Question(target, leaves, structure, autocast, self._mode).answer()
            if found.events:
                return found
            self._known[key] = found
        return self._known[key]


@dataclass(eq=False)
class Region:
    """Calls that run under `autocast` (None: it is disabled there). `weights` are the parameters that are cast already, by parameter and
    dtype: torch casts one once until it leaves the outermost context. `leaves` are the parameters that it does so with."""

    autocast: Autocast | None
    weights: dict[tuple[Node, torch.dtype], Node] = field(default_factory=dict)
    leaves: frozenset[Node] = frozenset()

    def casts_of(self, node: Node, args: Any, kwargs: Any, known: CastsOfCalls) -> Casts:
        """What it does to the call `node` on fake tensors."""
        return NOTHING if self.autocast is None else known.of(call_of(node), args, kwargs, self.autocast)


@dataclass(frozen=True)
class _Question:
    """What `autocast` does to the call of `target`."""

    target: Callable[..., Any]
    leaves: Sequence[Any]
    structure: Any
    autocast: Autocast
    mode: FakeTensorMode

    def answer(self) -> Casts:
        if not any(self._is_eligible(leaf) for leaf in self.leaves) or not self._may_cast():
            return NOTHING
        if self.target in _IN_FLOAT32:
            return Casts(
                {i: torch.float32 for i, leaf in enumerate(self.leaves) if self._is_eligible(leaf) and leaf.dtype != torch.float32}
            )
        try:
            wanted, _ = self._events(NOTHING, self.autocast)
        except (RuntimeError, AssertionError) as error:
            return self._where_it_does_not_run(error)
        with fake_errors_quiet():
            for casts in self._guesses(wanted):
                try:
                    if self._events(casts, None)[0] == wanted:
                        return casts
                except RuntimeError:  # of operands that only casts make alike
                    continue
        if not isinstance(self.target, OpOverload):
            raise CastInsideError("what a torch.autograd.Function computes is cast")
        odd = [str(event.target) for event in wanted if any(word in str(event.target) for word in _OF_A_DEVICE)]
        if odd:
            raise CastInsideError(f"{self.target} is cast inside, where it is made of {', '.join(dict.fromkeys(odd))}")
        events, returned = self._events(NOTHING, self.autocast, self._result())
        return Casts(events=events, returned=returned)

    def _where_it_does_not_run(self, error: Exception) -> Casts:
        """On fakes of a device that is not there: as on contiguous operands, which take fewer ways; else by what it is made of on a CPU."""
        tensors = {place: leaf for place, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)}
        compact = {place: torch.empty_like(leaf, memory_format=torch.contiguous_format) for place, leaf in tensors.items()}
        if any(compact[place].stride() != leaf.stride() for place, leaf in tensors.items()):
            return replace(self, leaves=[compact.get(place, leaf) for place, leaf in enumerate(self.leaves)]).answer()
        if self.autocast.device == "cuda" and not self._is_cast_inside():
            return NOTHING
        # So a kernel of CUDA's ends that looks for a device: in torch's builds without CUDA, and in those with it where there is no driver.
        if isinstance(error, (AssertionError, torch.AcceleratorError)):
            raise CastInsideError(f"{self.target} is cast inside, as CUDA alone can tell") from error
        raise error

    def _is_eligible(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64

    def _may_cast(self) -> bool:
        """Whether autocast has a kernel for the op, or it is made of others that may have one."""
        if not isinstance(self.target, OpOverload):
            return True
        return has_kernel(self.target, _KEYS[self.autocast.device]) or has_kernel(self.target, "CompositeImplicitAutograd")

    def _is_cast_inside(self) -> bool:
        """Whether one of the ops that the call consists of on a CPU is cast on a GPU: where fake ones of a GPU do not run."""
        on_cpu = _Question(self.target, self.leaves, self.structure, Autocast("cpu", self.autocast.dtype), self.mode)
        return any(has_kernel(event.target, _KEYS["cuda"]) for event in on_cpu._events(NOTHING, None)[0])

    def _guesses(self, wanted: Sequence[Event]) -> Generator[Casts]:
        """What could have been seen: nothing, casts of operands that stand there, a dtype for the result."""
        yield NOTHING
        operands = set(range(len(self.leaves)))
        yield Casts(
            {
                event.arguments[0].number: dtype
                for event in wanted
                if event.target is aten._to_copy.default and event.arguments[0].number in operands
                for dtype in event.arguments[1:]
                if isinstance(dtype, torch.dtype)
            }
        )
        names = [each.name for each in getattr(schema_of(self.target), "arguments", ())]
        args, kwargs = pytree.tree_unflatten(self.leaves, self.structure)
        if "dtype" in names[len(args) :] and kwargs.get("dtype") is None:
            yield Casts(dtype=torch.float32)

    def _result(self) -> Any:
        """What the call gives in a run: an LSTM that is one op of oneDNN's gives the lower dtype, and made of others float32."""
        with self.mode, torch.no_grad(), attribute_set(self.mode, "cache_enabled", False), _autocast(self.autocast, enabled=True):
            args, kwargs = pytree.tree_unflatten([self._fake(leaf) for leaf in self.leaves], self.structure)
            return self.target(*args, **kwargs)

    def _events(self, casts: Casts, autocast: Autocast | None, like: Any = None) -> tuple[tuple[Event, ...], Any]:
        """The ops that reach kernels, and what the call returns, in the dtypes of `like`, each tensor as a `Tensor`."""
        with self.mode, torch.no_grad(), without_onednn(self.mode), _autocast(self.autocast, enabled=autocast is not None):
            leaves = [self._fake(leaf) for leaf in self.leaves]
            with _Recorder(leaves) as recorder:
                cast = list(leaves)
                for place, dtype in casts.operands.items():  # in the order in which torch does it: which that is, is up to its compiler
                    cast[place] = leaves[place].to(dtype)
                args, kwargs = pytree.tree_unflatten(cast, self.structure)
                result = self.target(*args, **(kwargs | ({"dtype": casts.dtype} if casts.dtype is not None else {})))
                if like is not None:
                    result = pytree.tree_map(lambda made, wanted: made.to(wanted.dtype), result, like)
        return tuple(recorder.events), pytree.tree_map_only(torch.Tensor, recorder.numbered, result)

    def _fake(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(tuple(leaf.shape), leaf.stride(), dtype=leaf.dtype, device=self.autocast.device)


class _Recorder(TorchDispatchMode):
    """Notes every op that reaches a kernel."""

    def __init__(self, operands: Sequence[Any]) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._kept = list[torch.Tensor]()  # so that no two have one identity
        self._numbers = {id(operand): number for number, operand in enumerate(operands) if isinstance(operand, torch.Tensor)}
        self._next = len(operands)

    def numbered(self, tensor: torch.Tensor) -> Tensor:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = self._next
            self._next += 1
            self._kept.append(tensor)
        return Tensor(self._numbers[id(tensor)])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            leaves, structure = pytree.tree_flatten((args, kwargs or {}))
            flat = tuple(self.numbered(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
            results = tuple(self.numbered(leaf).number for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
            self.events.append(Event(func, flat, structure, results, isinstance(result, (tuple, list))))
        return result


@contextmanager
def _autocast(state: Autocast, enabled: bool) -> Generator[None]:
    """While this is entered, autocast is on or off for tensors on a device that need not be there: `torch.autocast` would refuse it."""
    before = torch.is_autocast_enabled(state.device), torch.get_autocast_dtype(state.device), torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(state.device, enabled)
    torch.set_autocast_dtype(state.device, state.dtype)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(state.device, before[0])
        torch.set_autocast_dtype(state.device, before[1])
        torch.set_autocast_cache_enabled(before[2])


@contextmanager
def autocast_off() -> Generator[None]:
    """While this is entered no autocast acts: programs have its casts as nodes, and a second one must not act on them."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


@contextmanager
def casts_not_cached() -> Generator[None]:
    """While this is entered autocast keeps no copies of parameters: those of a trace have no values."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
