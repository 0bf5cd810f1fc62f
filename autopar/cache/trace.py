"""What a model does, in lines that are equal in two processes exactly when it does the same: a run on fake tensors, recorded op by op.

A program that computes these ops is right for every model that has these lines, whatever its code reads on the way. A line has the op,
its scalars, where each operand lies (a parameter, a buffer, an input, an earlier result), whether gradients and autocast are on, the
module, and the lines of code on the stack with what they are compiled to. The backward is the graph that autograd makes.
What leaves no op, or what an op's name does not say, is `NotKnown`, and not cached.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from torch.fx import Interpreter

from autopar._torch import fake_errors_quiet, fake_mode, fake_mode_of, is_fake, pytree
from autopar.cache._torch import has_global_hooks, has_hooks, has_modes_around, is_plain, told_of_export, unseen_noted
from autopar.cache.describe import NotKnown, described
from autopar.cache.recorder import Recorder, literal_line
from autopar.driver.compiled import TENSOR
from autopar.frontend.assigned_buffers import assigned_buffers
from autopar.frontend.attributes import attributes_kept, num_hooks, numbers_of
from autopar.frontend.caches import caches_kept_clean
from autopar.frontend.fast_paths import fast_paths_off
from autopar.frontend.library_checks import library_checks_asserted
from autopar.frontend.module_hooks import BACKWARD_HOOKS
from autopar.frontend.outputs import OutputSpec
from autopar.frontend.value_checks import asserts_assumed
from autopar.graph.autocast import autocast_off, casts_not_cached
from autopar.graph.causal_biases import causal_biases_plain
from autopar.graph.model_device import model_device
from autopar.graph.synced_norms import norms_of_the_batch
from autopar.ir.program import Program


@dataclass(frozen=True)
class Trace:
    """`lines` say what the model does; `spec` is its output, of which `results` are the memory by flat index."""

    lines: tuple[str, ...]
    spec: OutputSpec
    recorder: Recorder
    results: dict[int, int]

    def is_done_by(self, program: Program) -> bool:
        """Whether the FORWARD `program` computes what this run did: what was captured may have taken other branches than the run."""
        kept = [int(item.name) for item in program.signature.outputs if item.kind in ("loss", "output")]
        same = program.signature.structure == self.spec.structure and program.signature.leaves == self.spec.leaves
        same = same and not any(is_fake(each) for each in program.constants.values())
        same = same and {literal_line(each) for each in program.constants.values()} <= self.recorder.literals
        return same and _computed(program) == self.recorder.needed(self.results[index] for index in kept)


def traced(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device | None = None) -> Trace:
    """Run `model(*args, **kwargs)` on fake tensors, told that it is being exported; nothing of the model is changed by it.

    They are where the model is, or on another `device`: programs are faked on the CPU.
    Raises `NotKnown` for what a record of ops does not know, and where the model fails.
    """
    _refuse_unseen(model)
    with as_exported(model) as written:
        found = _recorded(model, args, kwargs, device)
    return Trace((*found.lines, f"writes {sorted(written)}"), found.spec, found.recorder, found.results)


@contextmanager
def as_exported(model: nn.Module) -> Generator[Collection[str]]:
    """While this is entered, `model` may be run on fake tensors as an export runs it; nothing of it is changed by that. Gives the names of
    the attributes that it writes.

    Raises `NotKnown` in place of what the model raises, and where it changes what a record of ops does not tell of.
    """
    before = num_hooks(model), numbers_of(model)
    with attributes_kept(model) as written, caches_kept_clean(), library_checks_asserted(), casts_not_cached(), fake_errors_quiet():
        try:
            with (
                asserts_assumed(),
                told_of_export(),
                fast_paths_off(),
                causal_biases_plain(model),
                norms_of_the_batch(model),
                _draws_refused(),
            ):
                yield written
        except NotKnown:
            raise
        except Exception as error:
            raise NotKnown(f"the model does not run on fake tensors: {type(error).__name__}: {error}") from error
        if (num_hooks(model), numbers_of(model)) != before:
            raise NotKnown("forward changes hooks, numbers or flags of its modules")


@contextmanager
def _draws_refused() -> Generator[None]:
    """Raise `NotKnown` where random numbers were drawn, or generators seeded: on fake tensors torch draws none. They are as they were."""
    pythons, numpys, torchs = random.getstate(), numpy.random.get_state(legacy=False), torch.default_generator.get_state()
    try:
        yield
        now = random.getstate(), _words(numpy.random.get_state(legacy=False)), _words(torch.default_generator.get_state())
        if now != (pythons, _words(numpys), _words(torchs)):
            raise NotKnown("forward draws by Python's or numpy's random, or seeds a generator")
    finally:
        random.setstate(pythons)
        numpy.random.set_state(numpys)
        torch.default_generator.set_state(torchs)


def _words(state: Any) -> bytes:
    return pickle.dumps(state.tolist() if isinstance(state, torch.Tensor) else state)


def _refuse_unseen(model: nn.Module) -> None:
    if has_modes_around() or has_global_hooks():
        raise NotKnown("a mode or hooks around all of torch")
    if num_hooks(model) or any(vars(module)[kind] for module in model.modules() for kind in BACKWARD_HOOKS):
        raise NotKnown("modules with hooks")
    tensors = (*model.parameters(), *model.buffers())
    if any(has_hooks(each) for each in tensors) or not all(is_plain(each) for each in tensors):
        raise NotKnown("parameters or buffers with hooks, or of other kinds than plain tensors")


def _recorded(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device | None) -> Trace:
    mode, recorder = fake_mode(), Recorder(_recorded.__code__)
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    place = device or model_device(model)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    recorder.lines.append(f"called with {structure}")
    with mode:
        there = named if device is None else moved(named, device)
        fakes: dict[str, torch.Tensor] = {name: mode.from_tensor(value) if device is None else value for name, value in there.items()}
        given = [torch.zeros(each.shape, dtype=each.dtype, device=place) if isinstance(each, torch.Tensor) else each for each in leaves]
    for name, fake in fakes.items():
        recorder.name(name, fake)
    for number, each in enumerate(given):
        if isinstance(each, torch.Tensor):
            recorder.name(f"input {number}", each)
        else:
            recorder.lines.append(f"input {number} {described(each)}")
    before, (fake_args, fake_kwargs) = dict(fakes), pytree.tree_unflatten(given, structure)
    unseen: list[str] = []
    with mode, recorder, modules_noted(model, recorder.lines.append), unseen_noted(lambda: unseen.append("")):
        output = torch.func.functional_call(model, fakes, fake_args, fake_kwargs)
    if recorder.refused is not None:
        raise recorder.refused
    if unseen:
        raise NotKnown("forward uses an autograd function or a hook of its own, a checkpoint, or autograd itself")
    assigned = assigned_buffers(model, before, fakes)
    if "" in assigned.values():
        raise NotKnown("forward puts new tensors in the place of buffers")
    spec = OutputSpec.of(output, assigned)
    recorder.lines += [f"returns {spec.structure} {spec.loss_index} {spec.elements} {spec.assigned}"]
    recorder.lines += [described(each) for each in spec.leaves if each is not TENSOR]
    results = {index: each for index, each in enumerate(pytree.tree_leaves(output)) if isinstance(each, torch.Tensor)}
    recorder.end([*results.values()], {id(fake): name for name, fake in reversed(before.items())})
    memory = {index: min(recorder.memory(each)) for index, each in results.items()}
    return Trace((*recorder.lines, *recorder.stack.lines), spec, recorder, memory)


def moved(named: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """What would be there if the model were on `device`; tied parameters stay tied."""
    found: dict[int, torch.Tensor] = {}
    for each in named.values():
        empty = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=device)
        found.setdefault(id(each), empty.requires_grad_(each.requires_grad))
    return {name: found[id(each)] for name, each in named.items()}


@contextmanager
def modules_noted(model: nn.Module, note: Callable[[str], None]) -> Generator[None]:
    """`note` which modules are entered and left. Those that are called by hand, `module.forward(x)`, are on the stack alone."""
    paths = {module: path for path, module in model.named_modules()}

    def enter(module: nn.Module, args: Any) -> None:
        note(f"enter {paths.get(module, '?')} {type(module).__module__}.{type(module).__qualname__} {module.training}")

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        note(f"leave {paths.get(module, '?')}")

    first = nn.modules.module.register_module_forward_pre_hook(enter)
    last = nn.modules.module.register_module_forward_hook(leave)
    try:
        yield
    finally:
        first.remove()
        last.remove()


def _computed(program: Program) -> Counter[str]:
    """The ops of a FORWARD program, taken apart as those of the model are."""
    recorder = Recorder(_computed.__code__)
    values = [node.meta["val"] for node in program.placeholders]
    mode = fake_mode_of(values[0])
    with mode:
        given: Sequence[torch.Tensor] = [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device, requires_grad=item.requires_grad)
            for (item, _), each in zip(program.named_inputs(), values, strict=True)
        ]
    for (item, _), each in zip(program.named_inputs(), given, strict=True):
        words = f"input {item.name}" if item.kind == "batch" else item.name
        recorder.name(literal_line(program.constants[item.name]) if item.kind == "constant" else words, each)
    with autocast_off(), torch.random.fork_rng(devices=[]), mode, recorder:
        results = Interpreter(program.module()).run(*given)
    return recorder.needed(recorder.memory(results))
