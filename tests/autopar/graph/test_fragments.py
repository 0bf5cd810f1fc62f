"""The schedule: fragments between collectives, waits just before first use, buffers freed after their last."""

from __future__ import annotations

import operator
import zlib
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

import autopar
from autopar.driver.manager import run_passes
from autopar.frontend.capture import capture
from autopar.graph.fragments import FragmentCutter
from autopar.graph.gone_on_with import is_gone_on_with
from autopar.ir.collectives import LAUNCHES, all_reduce, is_launch, wait
from autopar.ir.instructions import Free, Launch, Pause, Run, Wait, parse
from autopar.ir.keys import BATCH, DIMS
from autopar.ir.mesh import Mesh, virtual_mesh
from autopar.ir.program import Program, operands
from autopar.ir.reshard import reachable
from autopar.ir.schedule import Schedule
from autopar.ir.sharding import Strategy
from autopar.ops.atoms import operand_result
from autopar.ops.strategies import placeholder_strategies, strategies_of
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.passes.local.lower import Lower
from autopar.testing.random_shardings import RandomShardings
from tests.support.captures import kept_capture
from tests.support.models.zoo import gpt2
from tests.support.programs import FORWARD_PASSES, global_program, random_local
from tests.support.schedules import check_schedules, scheduled

aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@dataclass(frozen=True)
class AlikeShardings(RandomShardings):
    """Random, but equal for equal ops on equal operands: equal layers get equal strategies."""

    def decide(self, program: Program) -> dict[str, Strategy]:
        chosen = {}
        for item, node in program.named_inputs():
            chosen[node] = self._pick(placeholder_strategies(item.kind, DIMS[node][0], program.mesh, BATCH[node][0]), item.kind, DIMS[node])
        for node in program.graph.nodes:
            if node.op == "call_function":
                possible = [s for s in strategies_of(node, program.mesh) if _fits(node, s, chosen)]
                chosen[node] = self._pick(possible, node.target, [chosen[operand].results for operand in operands(node)])
        return {node.name: strategy for node, strategy in chosen.items()}

    def _pick(self, possible, *key):  # type: ignore[no-untyped-def]
        return possible[zlib.crc32(f"{self.seed} {key}".encode()) % len(possible)]


def _fits(node, strategy, chosen):  # type: ignore[no-untyped-def]
    for operand, target in zip(operands(node), strategy.operands, strict=True):
        source = chosen[operand].results[operand_result(node, operand)]
        if (len(chosen[operand].results) > 1 and source != target) or not reachable(source, target):
            return False
    return True


def program_of(num_blocks: int = 2, training: bool = True, mesh: Mesh | None = None) -> Program:
    forward = capture(Model(num_blocks), (torch.randn(8, 8),), {}, mesh or virtual_mesh(dp=2, tp=2))
    return global_program(run_passes(forward, FORWARD_PASSES), training)


@pytest.fixture(scope="module")
def schedules() -> list[Schedule]:
    program = program_of()
    return [scheduled(random_local(program, seed)).places[0] for seed in range(4)]


def reads(instruction: object) -> tuple[str, ...]:
    if isinstance(instruction, Run):
        return instruction.inputs
    return instruction.sources if isinstance(instruction, Launch) else ()


def test_the_text_parses_back(schedules: list[Schedule]) -> None:
    for schedule in schedules:
        assert parse(str(schedule)) == schedule.instructions


def test_schedules_are_proved(schedules: list[Schedule]) -> None:
    mesh = virtual_mesh(dp=2, tp=2)
    for schedule in schedules:
        check_schedules([schedule] * mesh.size, mesh)


def test_no_collective_inside_a_fragment(schedules: list[Schedule]) -> None:
    for schedule in schedules:
        assert any(isinstance(instruction, Launch) for instruction in schedule.instructions)
        for fragment in schedule.fragments.values():
            targets = {node.target for node in fragment.module.graph.nodes}
            assert not targets & {*LAUNCHES, wait}, fragment.name


def test_waits_stand_just_before_the_first_use(schedules: list[Schedule]) -> None:
    """Behind a WAIT come only WAITs (and FREEs), then what reads the buffer, the PAUSE that hands it out, or what is done last."""
    for schedule in schedules:
        steps = [instruction for instruction in schedule.instructions if not isinstance(instruction, Free)]
        arrived = {instruction.name: set(instruction.targets) for instruction in steps if isinstance(instruction, Launch)}
        for position, instruction in enumerate(steps):
            if not isinstance(instruction, Wait):
                continue
            following = next((later for later in steps[position + 1 :] if not isinstance(later, Wait)), None)
            is_output = bool(arrived[instruction.target].intersection(schedule.outputs))
            is_late = not any(isinstance(later, Launch) for later in steps[position + 1 :])
            is_read = bool(arrived[instruction.target].intersection(reads(following)))
            assert is_read or is_late or (is_output and isinstance(following, Pause | None)), instruction
            assert not any(arrived[instruction.target].intersection(reads(earlier)) for earlier in steps[:position])


def test_every_launch_is_waited_for_once(schedules: list[Schedule]) -> None:
    for schedule in schedules:
        launched = [instruction.name for instruction in schedule.instructions if isinstance(instruction, Launch)]
        waited = [instruction.target for instruction in schedule.instructions if isinstance(instruction, Wait)]
        assert sorted(launched) == sorted(waited) and len(set(waited)) == len(waited)


def test_launches_keep_the_graphs_order() -> None:
    """All ranks run one schedule, so any order is matched; the graph's is the one that passes decide. Buckets delay some, what lies on
    a rank from the start is gathered sooner, for a fragment that reads several, and sums of gradients leave behind what is waited for."""
    local = random_local(program_of(), 5)
    launches = [instruction for instruction in scheduled(local, joins=False).places[0].instructions if isinstance(instruction, Launch)]
    launched = [name for instruction in launches for name in instruction.targets]
    graphs = [node.name for node in local.graph.nodes if is_launch(node)]
    inputs = {node.name for node in local.graph.nodes if node.op == "placeholder"}
    sooner = {name for each in launches for name, source in zip(each.targets, each.sources, strict=True) if source in inputs}
    later = {node.name for node in local.graph.nodes if is_launch(node) and not is_gone_on_with(node)}
    assert 0 < len(sooner) < len(graphs) and later and sorted(launched) == sorted(graphs)
    for apart in (sooner | later, {*graphs} - later):
        assert [name for name in launched if name not in apart] == [name for name in graphs if name not in apart]
    assert all(set(launched[: launched.index(name)]) <= set(graphs[: graphs.index(name)]) | sooner for name in sooner)


def test_buffers_live_until_their_last_reader(schedules: list[Schedule]) -> None:
    for schedule in schedules:
        alive, flying = set(schedule.inputs), dict[str, tuple[str, ...]]()
        for instruction in schedule.instructions:
            assert all(name in alive for name in reads(instruction)), instruction
            lent = {name for names in flying.values() for name in names}
            if isinstance(instruction, Free):
                assert set(instruction.buffers) <= alive, instruction
                assert not set(instruction.buffers) & ({*schedule.inputs, *schedule.outputs} | set(flying) | lent), instruction
                alive -= set(instruction.buffers)
            elif isinstance(instruction, Run):
                assert not alive & set(instruction.outputs)
                alive |= set(instruction.outputs)
            elif isinstance(instruction, Launch):
                alive |= set(instruction.targets)
                flying[instruction.name] = instruction.sources
            elif isinstance(instruction, Wait):
                del flying[instruction.target]
        assert alive == {*schedule.inputs, *schedule.outputs} and not flying, "nothing is kept that nobody wants"


def test_one_pause_between_forward_and_backward(schedules: list[Schedule]) -> None:
    for schedule in schedules:
        assert sum(isinstance(instruction, Pause) for instruction in schedule.instructions) == 1
        pause = schedule.instructions.index(Pause())
        (loss,) = [name for item, name in zip(schedule.signature.outputs, schedule.outputs, strict=True) if item.kind == "loss"]
        (tangent,) = [name for item, name in zip(schedule.signature.inputs, schedule.inputs, strict=True) if item.kind == "tangent"]
        before, after = schedule.instructions[:pause], schedule.instructions[pause:]
        made = [name for instruction in before if isinstance(instruction, Launch) for name in instruction.targets]
        made += [name for instruction in before if isinstance(instruction, Run) for name in instruction.outputs]
        assert loss in made
        assert not any(tangent in reads(instruction) for instruction in before)
        assert any(tangent in reads(instruction) for instruction in after)


def test_what_an_op_of_several_results_gives_last_of_all_is_written_once() -> None:
    """Only the caller reads it, and it depends on a collective: it is computed behind all else."""
    graph = Graph()
    x = graph.placeholder("x")
    whole = graph.call_function(wait, (graph.call_function(all_reduce, (x, ("dp",), "sum")),))
    both = graph.call_function(aten.var_mean.default, (whole,))
    results = [graph.call_function(operator.getitem, (both, index)) for index in (0, 1)]
    graph.output(tuple(results))
    for node in graph.nodes:
        node.meta["val"] = (torch.empty(()),) * 2 if node is both else torch.empty(4) if node not in results else torch.empty(())
    section = FragmentCutter("cpu", {}).section([node for node in graph.nodes if node.op == "call_function"], set())
    (run,) = (each for each in section if isinstance(each, Run))
    assert run.outputs == ("getitem", "getitem_1")


def test_inference_has_no_pause() -> None:
    schedule = scheduled(random_local(program_of(training=False), 0)).places[0]
    assert Pause() not in schedule.instructions


def test_fragments_run_and_take_what_they_are_given(schedules: list[Schedule]) -> None:
    for schedule in schedules:
        runs = [instruction for instruction in schedule.instructions if isinstance(instruction, Run)]
        for name, fragment in schedule.fragments.items():
            uses = [run for run in runs if run.fragment == name]
            assert uses
            num_inputs = len(fragment.module.graph.find_nodes(op="placeholder"))
            (results,) = fragment.module.graph.output_node().args
            for run in uses:
                assert len(run.inputs) == num_inputs and len(run.outputs) == len(results)  # type: ignore[arg-type]
                shapes = [schedule.buffers[buffer].type[0] for buffer in run.inputs]
                assert shapes == [tuple(node.meta["val"].shape) for node in fragment.module.graph.find_nodes(op="placeholder")]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_equal_layers_share_fragments(seed: int) -> None:
    """Two more layers, as random shardings may alternate, bring more instructions and no fragment, forward and backward alike."""
    found = []
    for num_blocks in (4, 6):
        local = run_passes(program_of(num_blocks), (AlikeShardings(seed), InsertReshards(), Lower()))
        found.append(scheduled(local).places[0])
    assert len(found[1].instructions) > len(found[0].instructions)
    assert len(found[1].fragments) == len(found[0].fragments)
    assert _codes(found[1]) == _codes(found[0])


def _codes(schedule: Schedule) -> set[str]:
    graphs = [fragment.module.graph for fragment in schedule.fragments.values()]
    return {" ".join(str(node.target) for node in graph.nodes if node.op == "call_function") for graph in graphs}


def test_equal_layers_of_gpt2_share_fragments() -> None:
    counts = []
    for num_layers in (3, 5):  # random shardings may alternate
        case = gpt2(num_layers)
        forward = kept_capture(case.model, (), case.batch, virtual_mesh(tp=2))
        program = global_program(run_passes(forward, FORWARD_PASSES))
        counts.append(len(scheduled(run_passes(program, (AlikeShardings(1), InsertReshards(), Lower()))).fragments))
    assert counts[0] == counts[1], counts


@pytest.mark.slow
def test_the_number_of_fragments_does_not_grow_with_depth() -> None:
    """By the search's own plan."""
    counts = []
    for num_layers in (6, 8):
        case = gpt2(num_layers)
        parallel = autopar.compile(case.model, virtual_mesh(dp=2, tp=2), example_inputs=case.batch, backend="eager")
        counts.append(len(parallel.compiled.schedule.fragments))
    assert counts[0] == counts[1] < 100, counts


def test_creation_is_on_the_device_asked_for() -> None:
    class Created(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight * torch.arange(8)).sum()

    forward = capture(Created(), (torch.randn(8, 8),), {}, virtual_mesh(dp=2))
    local = random_local(global_program(run_passes(forward, FORWARD_PASSES)), 0)
    for device in ("cpu", "meta"):
        found = [
            node.kwargs["device"]
            for fragment in scheduled(local, device).fragments.values()
            for node in fragment.module.graph.nodes
            if "device" in node.kwargs
        ]
        assert found and set(found) == {torch.device(device)}
