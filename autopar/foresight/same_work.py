"""Whether a model with few of its layers does what it does with all: a forward of each on fake tensors is compared op by op.

    before  layer 0  between  layer 1  between  layer 2 … layer 78  between  layer 79  after     a model
    before  layer 0  between  layer 1  between  layer 2                                after     with few layers

An op is where `autopar.foresight.read_work` counts it: in its layer, else behind the last one that it reads. Layer 1, and what stands
before it, are counted for all to layer 78; so what is there must be the same in each of them, and must read alike: of the same layer, of
so many layers before, of the first, or of what stands around layers. Backwards follow from that.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from autopar._torch import TorchDispatchMode, fake_mode, pytree, schema_of, writes_operands
from autopar.cache.describe import NotKnown
from autopar.cache.trace import as_exported, modules_noted, moved
from autopar.foresight.capture_work import Layered, Shortened
from autopar.frontend.outputs import OutputSpec
from autopar.ir.pattern import matches_module, matches_name
from autopar.plans.plan import Plan
from autopar.plans.styles import UserPins

# What these do takes as long whatever number they are given.
_ANY_NUMBER = ("aten::add", "aten::sub", "aten::rsub", "aten::mul", "aten::div", "aten::fill", "aten::masked_fill")
# Where a value of no layer comes from.
_AROUND = -1


class _Value(NamedTuple):
    """The `number`-th value that is made at a place, or what comes from outside, by name."""

    place: int
    number: int | str


class _Op(NamedTuple):
    text: str
    reads: tuple[_Value, ...]


@dataclass(frozen=True)
class _Record:
    """The ops of a run by place: 2k + 1 is the layer k, 2k what stands before it, or behind the last one. `results` are asked for."""

    model: Layered
    ops: Mapping[int, list[_Op]]
    results: tuple[_Value, ...]


def why_other(whole: Layered, few: Shortened, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why amounts of work that are read off `few` are not those of `whole`; "" where they are."""
    try:
        theirs = _recorded(few, args, kwargs)
    except NotKnown as why:
        return f"with few layers {why}"
    try:
        return _difference(_recorded(whole, args, kwargs), theirs, few.shown)
    except NotKnown as why:
        return str(why)


def why_other_pins(whole: Layered, few: Shortened, pins: UserPins | Plan | None) -> str:
    """Why `pins` do not say of `few` what they say of `whole`; "" where they do."""
    if isinstance(pins, Plan):
        return "" if len(few.layers) == len(whole.layers) else "the plan that was passed as pins is of all layers"
    for pattern in pins or ():
        theirs, ours = _pinned(few.model, pattern, {}), _pinned(whole.model, pattern, few.shown)
        if theirs != ours:
            return f"{pattern!r} does not pin all equal layers alike"
    return ""


def _pinned(model: nn.Module, pattern: str, shown: Mapping[str, str]) -> set[tuple[str, bool]]:
    """What a pattern means and what it does not, by the names that things have with few layers."""

    def name_with_few(name: str) -> str:
        parts = name.split(".")
        at = next((end for end in range(1, len(parts) + 1) if ".".join(parts[:end]) in shown), 0)
        return ".".join([shown[".".join(parts[:at])], *parts[at:]]) if at else name

    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    modules = [path for path, _ in model.named_modules(remove_duplicate=False)]
    found = {(name_with_few(name), matches_name(name, pattern)) for name in parameters}
    return found | {(name_with_few(path), matches_module(path, pattern)) for path in modules}


def _difference(ours: _Record, theirs: _Record, shown_as: Mapping[str, str]) -> str:
    whole, few = ours.model.layers, theirs.model.layers
    numbers = {layer.path: number for number, layer in enumerate(few)}
    shown = [2 * numbers[shown_as[layer.path]] for layer in whole]
    places = {_AROUND: _AROUND, 2 * len(whole): 2 * len(few)}
    for number, place in enumerate(shown):
        places[2 * number], places[2 * number + 1] = place, place + 1
    wanted, found = _Reading(theirs, {place: place for place in places.values()}, theirs.model), _Reading(ours, places, theirs.model)
    for place, at in places.items():
        if found.ops(place) != wanted.ops(at):
            return f"what is done {_told(ours.model, place)} is not what is done {_told(theirs.model, at)} with few"
    theirs_by_place, ours_by_place = wanted.outside(), found.outside()
    for place, at in places.items():
        if ours_by_place.get(place, set()) != theirs_by_place.get(at, set()):
            return f"what is made {_told(ours.model, place)} is read elsewhere than what is made {_told(theirs.model, at)} with few"
    if found.results() != wanted.results():
        return "it returns something else with few"
    return ""


def _told(model: Layered, place: int) -> str:
    number, is_layer = divmod(place, 2)
    if is_layer:
        return f"in {model.layers[number].path}"
    return f"before {model.layers[number].path}" if number < len(model.layers) else "behind the layers"


class _Reading:
    """A record in words that are the same for all layers that one stands for. `places` says where a place is in the model with `few`."""

    def __init__(self, record: _Record, places: Mapping[int, int], few: Layered) -> None:
        self.record, self.places, self.few = record, places, few
        self.layers = record.model.layers
        self.readers: defaultdict[_Value, set[int]] = defaultdict(set)
        for place, ops in record.ops.items():
            for value in (value for op in ops for value in op.reads):
                self.readers[value].add(place)
        for value in record.results:
            self.readers[value].add(2 * len(self.layers))

    def ops(self, place: int) -> list[tuple[str, tuple[Any, ...]]]:
        return [(op.text, tuple(self.name(value, place) for value in op.reads)) for op in self.record.ops.get(place, [])]

    def results(self) -> list[Any]:
        return [self.name(value, 2 * len(self.layers)) for value in self.record.results]

    def name(self, value: _Value, reader: int) -> Any:
        place, row = value.place, self.row(reader)
        if place in (reader, _AROUND):
            return "own" if place == reader else "around", value.number
        is_one = self.count(place) == 1
        if (is_one and self.is_shared(value, reader)) or self.row(place) is None:
            return self.places[place], value.number
        if row is not None and (row == self.row(place) or not is_one or self.count(reader) > 1):
            return self.row(place), place % 2, self.index(place) - self.index(reader), value.number
        return self.places[place] if is_one else self.row(place), value.number

    def is_shared(self, value: _Value, reader: int) -> bool:
        """Whether others of the row read it, too, than the layer beside its own."""
        row = self.row(reader)
        indices = {self.index(place) for place in self.readers[value] if row is not None and self.row(place) == row}
        if row is not None and row == self.row(value.place):
            return max(indices) > self.index(value.place) + 1
        return len(indices) > 1

    def outside(self) -> dict[int, set[Any]]:
        """Who reads what is made at places of which one stands for all."""
        found: dict[int, set[Any]] = {}
        for value, readers in self.readers.items():
            if self.count(value.place) > 1:
                found.setdefault(value.place, set()).update((value.number, *self.from_(value.place, reader)) for reader in readers)
        return found

    def from_(self, place: int, reader: int) -> tuple[Any, ...]:
        row = self.row(reader)
        return (self.places[reader],) if row is None else (row, reader % 2, self.index(reader) - self.index(place))

    def row(self, place: int) -> str | None:
        return self.layers[place // 2].row if 0 <= place < 2 * len(self.layers) else None

    def index(self, place: int) -> int:
        return self.layers[place // 2].index

    def count(self, place: int) -> int:
        """Of the layers that the one there stands for, or is stood for with."""
        at = self.places[place] // 2
        return self.few.layers[at].count if at < len(self.few.layers) else 1


# ---- a run


def _recorded(model: Layered, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Record:
    mode, recorder = fake_mode(), _Recorder({path: number for number, path in enumerate(model.paths)})
    module = model.model
    named = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    leaves, structure = pytree.tree_flatten((args, kwargs))
    cpu = torch.device("cpu")
    with as_exported(module), torch.enable_grad():
        with mode:
            fakes = moved(named, cpu)
            given = [torch.zeros(each.shape, dtype=each.dtype, device=cpu) if isinstance(each, torch.Tensor) else each for each in leaves]
        for name, fake in fakes.items():
            recorder.given(name, fake)
        for number, each in enumerate(given):
            if isinstance(each, torch.Tensor):
                recorder.given(f"input {number}", each)
        fake_args, fake_kwargs = pytree.tree_unflatten(given, structure)
        with mode, recorder, modules_noted(module, recorder.note):
            output = torch.func.functional_call(module, fakes, fake_args, fake_kwargs)
        spec = OutputSpec.of(output, {})
        results = _tensors(output)
        if spec.loss_index is not None:
            results = [pytree.tree_leaves(output)[spec.loss_index]]
        return _Record(model, recorder.ops, tuple(recorder.value(each) for each in results))


class _Recorder(TorchDispatchMode):
    """Notes each op at its place; `numbers` are those of layers, by path."""

    def __init__(self, numbers: Mapping[str, int]) -> None:
        super().__init__()
        self.numbers = numbers
        self.ops: defaultdict[int, list[_Op]] = defaultdict(list)
        self.values: dict[StorageWeakRef, _Value] = {}
        self.made: Counter[int] = Counter()
        self.inside: list[str] = []
        self.held: list[torch.Tensor] = []  # so that no memory takes the place of another

    def note(self, line: str) -> None:
        word, path, *_ = line.split(" ")
        if word == "enter":
            self.inside.append(path)
        else:
            self.inside.pop()

    def given(self, name: str, tensor: torch.Tensor) -> None:
        number = self.layer_of(name)
        value = _Value(_AROUND, name) if number is None else _Value(2 * number + 1, name.removeprefix(self.path_of(name)))
        self.held.append(tensor)
        self.values.setdefault(StorageWeakRef(tensor.untyped_storage()), value)

    def value(self, tensor: torch.Tensor) -> _Value:
        return self.values.get(StorageWeakRef(tensor.untyped_storage()), _Value(_AROUND, "a constant"))

    def path_of(self, name: str) -> str:
        parts = name.split(".")
        paths = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return next((path for path in paths if path in self.numbers), "")

    def layer_of(self, name: str) -> int | None:
        return self.numbers.get(self.path_of(name))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].device  # a question, and no op
        operands = _tensors((args, kwargs))
        reads, writes = tuple(map(self.value, operands)), writes_operands(func)
        place = self.place_of(reads)
        schema = schema_of(func)
        takes_any = schema is not None and schema.name.rstrip("_") in _ANY_NUMBER
        text = f"{func} {pytree.tree_map(lambda leaf: _described(leaf, takes_any), (args, kwargs))}"
        result = func(*args, **(kwargs or {}))
        for each in [*_tensors(result), *operands[: int(writes)]]:
            memory = StorageWeakRef(each.untyped_storage())
            self.held.append(each)
            if writes or memory not in self.values:
                self.values[memory] = _Value(place, self.made[place])
                self.made[place] += 1
        self.ops[place].append(_Op(f"{text} -> {[_described(each, False) for each in _tensors(result)]}", reads))
        return result

    def place_of(self, reads: Sequence[_Value]) -> int:
        layer = self.layer_of(self.inside[-1]) if self.inside else None
        if layer is not None:
            return 2 * layer + 1
        return max((value.place + value.place % 2 for value in reads if isinstance(value.number, int)), default=0)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]


def _described(leaf: Any, is_any_number: bool) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype} {leaf.requires_grad}"
    return "a number" if is_any_number and isinstance(leaf, (int, float)) and not isinstance(leaf, bool) else repr(leaf)
