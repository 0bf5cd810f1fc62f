"""Verify a parallel module: what was compiled, and its own run with its backend and its transport, against the original."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from autopar.driver.alone import TRACING
from autopar.driver.compiled import Compiled
from autopar.graph.promote import promote_tensor
from autopar.ir.mesh import Mesh, parent
from autopar.ir.padding import unpadded
from autopar.ir.program import Input
from autopar.ir.sharding import Sharding
from autopar.runtime.execute.agreement import agreed
from autopar.runtime.execute.call import Call
from autopar.runtime.execute.fragments import CompiledFragments
from autopar.runtime.execute.random_key import random_key
from autopar.runtime.execute.shares import share_of
from autopar.runtime.execute.world import Parts, RankParts
from autopar.runtime.module.captures import Captured
from autopar.runtime.module.inputs import CallInputs
from autopar.runtime.module.lengths import at_length
from autopar.runtime.module.module_state import ModuleState
from autopar.runtime.module.parameters import local_shard
from autopar.runtime.module.state import full_state
from autopar.runtime.verify.compare_forms import verify_compiled
from autopar.runtime.verify.compare_values import Scales, difference_at
from autopar.runtime.verify.copied_model import copy_model
from autopar.runtime.verify.padding import Arguments, padding_change
from autopar.runtime.verify.reference_run import Case, Results, assembled, run_local, run_separated
from autopar.runtime.verify.report import Difference, PaddingChange, Report, error_of


def verify(
    parallel: ModuleState, args: tuple[Any, ...], kwargs: dict[str, Any], promote: bool = False, tolerance: float | None = None
) -> Report:
    """Prove on one batch that `parallel` computes what its model computes on the global batch.

    Inputs as in a call; so are the errors raised. With `promote` both sides are in float64, and errors within 1e-9 are asked
    for, otherwise 1e-4, and 6e-2 or 8e-3 where the model computes in bfloat16 or float16, unless `tolerance` is given. Gradients,
    buffers, seed, step and torch's generator stay as they were.
    Collective: every rank works through the whole, and holds the whole model for that time.
    """
    with TRACING:
        inputs, captured = parallel.captured(args, kwargs, runs=True)
        world = parallel._world
        seed = parallel.seed if parallel.seed is not None else int(world.gather(torch.initial_seed())[0])
        key = random_key(seed, parallel.step + captured.draws)
        model = parallel._model if world.is_virtual else whole_model(parallel)
        args, kwargs = inputs.call() if world.is_virtual else global_inputs(parallel, inputs, captured.batch_dims)
        run = _OwnRun(parallel, inputs, captured.fragments, promote)
        padding = _padding_change(parallel, inputs, captured, model, (args, kwargs), promote)
        report = verify_compiled(model, captured.compiled, args, kwargs, promote=promote, tolerance=tolerance, key=key, run=run)
        return replace(report, padding=padding)


def _padding_change(
    parallel: ModuleState, inputs: CallInputs, captured: Captured, model: nn.Module, call: Arguments, promote: bool
) -> PaddingChange | None:
    """What padding changes of the global batch, or where ranks have batches of several lengths, of the share where it changes most.
    Collective."""
    lengths, signature = inputs.lengths, captured.compiled.forward.signature
    if lengths is None or lengths.shortest == lengths.padded:
        return None
    if lengths.shortest == lengths.longest:
        own = at_length(lengths, lengths.own, *call)
        return padding_change(model, signature, own, call, (lengths.own, lengths.padded), promote)

    def of_share() -> PaddingChange | None:
        sizes = [tensor.shape[captured.batch_dims[index]] for index, _, tensor in inputs.tensors if index in captured.batch_dims]
        if 0 in sizes or lengths.own in (0, lengths.padded):
            return None
        own = at_length(lengths, lengths.own, *inputs.call())
        return padding_change(model, signature, own, inputs.call(), (lengths.own, lengths.padded), promote)

    found = agreed(parallel._world, of_share, "what padding changes")
    everyone: list[PaddingChange | None] = parallel._world.gather(found, "what padding changes")
    return max((each for each in everyone if each is not None), key=lambda each: each.worst, default=None)


def whole_model(parallel: ModuleState) -> nn.Module:
    """A copy of the model with every parameter whole, on the CPU."""
    named = dict(parallel._model.named_parameters(remove_duplicate=False)) | dict(parallel._model.named_buffers(remove_duplicate=False))
    full = full_state(named, parallel._world, dict(parallel._model.named_parameters()))  # a state dict has what hooks make of it
    return copy_model(parallel._model, {id(value): full[name].cpu() for name, value in named.items()}, promoted=False)


def global_inputs(parallel: ModuleState, inputs: CallInputs, dims: Mapping[int, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call on the global batch, from every rank's share along dp."""
    mesh = parallel.mesh
    everyone = parallel._world.gather({index: tensor.detach().cpu() for index, _, tensor in inputs.tensors})
    first = {mesh.index(rank, mesh.parts("dp")): rank for rank in reversed(range(mesh.size))}

    def whole(index: int, tensor: torch.Tensor) -> torch.Tensor:
        if index not in dims:
            return tensor
        return torch.cat([everyone[first[place]][index] for place in sorted(first)], dims[index])

    return inputs.call(whole)


class _OwnRun:
    """The module's own run: its world, its backend, on copies of what it would write into."""

    def __init__(self, parallel: ModuleState, inputs: CallInputs, fragments: CompiledFragments, promoted: bool) -> None:
        self.world, self.backend = parallel._world, parallel._backend
        self.device = self.world.device(parallel._model)
        self.fragments, self.promoted = fragments, promoted
        self.tensors = {name: self._own(value) for name, value in (*parallel.named_parameters(), *parallel.named_buffers())}
        self.leaves = [self._own(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in inputs.leaves]

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().clone()
        return promote_tensor(tensor) if self.promoted else tensor

    def __call__(self, compiled: Compiled, case: Case, agrees: Callable[[Results], bool], tolerance: float) -> Difference | None:
        fragments = CompiledFragments(compiled.schedule.fragments, self.backend) if self.promoted else self.fragments
        buffers = {name: tensor.clone() for name, tensor in self.tensors.items()}
        call = Call(compiled, fragments, self.world, buffers, self.leaves, case.key, self.device, scale=_scale(compiled, case))
        self._run(call, compiled, case)
        signature = compiled.signature
        results = [self._everyones(call.held(item)) for item in signature.outputs]
        misplaced = self._first(self._misplaced(call, compiled, case))
        if agrees(assembled(signature, results, case)) and misplaced is None:
            return None
        return misplaced or self._locate(compiled, case, tolerance)

    def _run(self, call: Call, compiled: Compiled, case: Case) -> None:
        call.forward()
        if not call.has_backward:
            return
        tangents = {}
        for item in compiled.signature.inputs_of("tangent"):
            whole = unpadded(case.value(item, compiled.local), item.padding)
            tangents[item.name] = whole.to(self.device) if self.world.is_virtual else self._share(whole, item, compiled.mesh)
        call.backward(tangents)

    def _share(self, tangent: torch.Tensor, item: Input, mesh: Mesh) -> torch.Tensor:
        """This rank's part along dp of an output's tangent, as if of its own loss: gradients are of the mean of these."""
        assert item.sharding is not None, item
        if item.shares:
            return share_of(tangent, item, mesh, self.world.ranks[0]).to(self.device) * mesh.num_shares
        along = Sharding(tuple(tuple(axis for axis in split if parent(axis) == "dp") for split in item.sharding.splits))
        return local_shard(tangent, item.dims, along, mesh, self.world.ranks[0]).to(self.device) * mesh.size_of(along.axes)

    def _everyones(self, held: RankParts) -> RankParts:
        gathered: Parts = {}
        for parts in self.world.gather({rank: part.cpu() for rank, part in held.parts.items()}):
            gathered |= parts
        return held._replace(parts=gathered)

    def _first(self, difference: Difference | None) -> Difference | None:
        """The difference of the first rank that has one."""
        return next((found for found in self.world.gather(difference) if found is not None), None)

    def _misplaced(self, call: Call, compiled: Compiled, case: Case) -> Difference | None:
        """The first input of which a rank holds something else than its part: a stale parameter, a wrong slice."""
        mesh = compiled.mesh
        for rank, state in call.states.items():
            schedule = compiled.schedule_of(rank)
            for item, name in zip(schedule.signature.inputs, schedule.inputs, strict=True):
                if item.kind not in ("parameter", "buffer", "constant", "batch"):
                    continue
                assert item.sharding is not None, item
                place = rank * mesh.num_microbatches + schedule.microbatch_of(name)
                wanted = local_shard(case.value(item, compiled.local), item.dims, item.sharding, mesh, place)
                held = state.parked[name].kept if name in state.parked else state.buffers[name]
                assert held is not None, name
                error = error_of(held.cpu(), wanted)
                if error:
                    return Difference(name, "", "runtime", error, f"rank {rank} holds another value of {item.kind} {item.name!r}")
        return None

    def _locate(self, compiled: Compiled, case: Case, tolerance: float) -> Difference:
        """Run once more, keeping what every rank writes, and compare with the LOCAL program node by node.

        The schedule's buffers have the names of the nodes.
        """
        call = Call(
            compiled,
            CompiledFragments(compiled.schedule.fragments, self.backend),
            self.world,
            dict(self.tensors),
            self.leaves,
            case.key,
            self.device,
            scale=_scale(compiled, case),
        )
        for state in call.states.values():
            state.buffers = _Kept()
        self._run(call, compiled, case)
        found: list[Difference] = []
        each = compiled.mesh.num_microbatches
        # What cancels in the middle of a step may be off by more than its results are.
        limit, scales = tolerance if self.promoted else max(tolerance, 1e-3), Scales()

        def observe(node: Node, values: Sequence[Any]) -> None:
            for rank, state in call.states.items():
                kept = state.buffers.history if isinstance(state.buffers, _Kept) else {}
                for number in range(each):
                    buffer = kept.get(f"{node.name}@{number}", kept.get(node.name))
                    value = values[rank * each + number]
                    if buffer is not None and isinstance(value, torch.Tensor) and not found:
                        error = error_of(buffer.cpu(), value, scales.floor_of(node, value))
                        if error > limit:
                            of_microbatch = f", microbatch {number}" if each > 1 else ""
                            found.append(difference_at(node, error, f"on rank {rank}{of_microbatch}"))

        if compiled.separated is not None:
            run_separated(compiled.separated, case, observe)
        else:
            run_local(compiled.local, case, observe)
        first = self._first(found[0] if found else None)
        if first is None:
            return Difference("(no single node)", "", "runtime", float("nan"))
        return Difference(first.node, first.source, "runtime", first.error, first.detail)


def _scale(compiled: Compiled, case: Case) -> float:
    """The gradient of the loss."""
    losses = compiled.signature.outputs_of("loss")
    return float(case.tangents[losses[0].name]) if losses and losses[0].name in case.tangents else 1.0


class _Kept(dict[str, torch.Tensor]):
    """Buffers that remember what was written into them first, also after they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.history: dict[str, torch.Tensor] = {}

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        super().__setitem__(name, tensor)
        self.history.setdefault(name, tensor.clone())

    def update(self, entries: Any = (), /, **named: torch.Tensor) -> None:
        for name, tensor in dict(entries, **named).items():
            self[name] = tensor
