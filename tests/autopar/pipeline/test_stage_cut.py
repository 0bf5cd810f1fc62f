"""A program in pieces: nothing lost, nothing twice, sent where it is read, summed where it is wanted."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import Node

from autopar.ir.actions import Edge
from autopar.ir.collectives import LAUNCHES, wait
from autopar.ir.keys import PHASE, STAGE
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.pipeline.schedules import generate
from autopar.pipeline.stage_cut import StageCut, cut_stages
from tests.support.programs import PP2, passed

aten = torch.ops.aten


class Skipping(nn.Module):
    """An embedding tied to the head, layers, what the first made read by the last, a loss over a count of labels."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.symbols = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_layers))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        first = x = self.symbols(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits = (x + first) @ self.symbols.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def cut(mesh: Mesh = PP2, schedule: str = "1f1b", number: int = 2) -> StageCut:
    order = generate(schedule, mesh.size_of(("pp",)), number)
    args = (torch.randint(0, 6, (8, 3)), torch.randint(0, 6, (8, 3)))
    return cut_stages(passed(Skipping(), args, None, mesh, number, order), order.num_stages)


def loop(stages: StageCut) -> list[Node]:
    return [node for (_, kind), nodes in stages.actions.items() if kind in ("F", "B") for node in nodes]


def calls(program: Program) -> set[Node]:
    return {node for node in program.graph.nodes if node.op == "call_function"}


def test_every_call_is_in_one_piece() -> None:
    stages = cut()
    pieces = [*loop(stages)]
    for table in (stages.ahead, stages.from_counts):
        pieces += [node for nodes in table.values() for node in nodes]
    pieces += [node for each in stages.sums for node in each.after]
    launches = [node for pairs in stages.counts.values() for _, node in pairs]
    pieces += launches + [user for node in launches for user in node.users]
    assert len(pieces) == len(set(pieces))
    left_out = calls(stages.program) - set(pieces)
    assert {node.target for node in left_out} == {aten.add.Tensor}, "the sum of a tie's gradients is taken once a step"


def test_an_action_has_the_calls_of_its_stage_and_phase_in_order() -> None:
    stages = cut()
    for (stage, kind), nodes in stages.actions.items():
        assert {STAGE[node] for node in nodes} <= {stage}
        assert {PHASE[node] for node in nodes} <= {"forward" if kind == "F" else "backward"}
        order = list(stages.program.graph.nodes)
        assert [order.index(node) for node in nodes] == sorted(order.index(node) for node in nodes)


def test_the_halves_of_a_backward_are_what_is_waited_for_and_the_rest() -> None:
    stages = cut()
    for stage in range(2):
        whole, inner, rest = (stages.actions[stage, kind] for kind in ("B", "I", "W"))
        assert set(inner) | set(rest) == set(whole) and not set(inner) & set(rest)
        assert not any(user in inner for node in rest for user in node.users), "nobody waits for W"
    assert not stages.actions[0, "I"], "nobody is before the first stage"
    assert stages.actions[1, "I"] and stages.actions[1, "W"]


def test_what_one_stage_reads_of_another_is_sent() -> None:
    stages = cut(Mesh((("pp", 4),)))
    made = {node: STAGE[node] for node in loop(stages)}
    for node in loop(stages):
        for operand in node.all_input_nodes:
            if operand in made and made[operand] != made[node]:
                way = "F" if PHASE[operand] == "forward" and made[operand] < made[node] else "B"
                assert operand in stages.transfers[made[operand], made[node], way]
    assert any(edge.target - edge.source > 1 for edge in stages.edges), "what the first stage made, a late one reads"
    assert {Edge(0, 1), Edge(1, 2), Edge(2, 3)} <= set(stages.edges)


def test_counts_are_added_up_before_the_first_microbatch() -> None:
    stages = cut(Mesh((("pp", 2), ("dp", 2))))
    assert not stages.counts[0], "the last stage alone has the loss"
    ((added, total),) = stages.counts[1]
    assert added in stages.ahead[1] and total.args[1] == ("mb",)
    # Over dp it is summed once.
    assert [node.target for node in stages.from_counts[1] if node.target in LAUNCHES or node.target is wait] == [total.target, wait]
    assert set(stages.from_counts[1]) <= stages.per_step


def test_gradients_of_a_tie_are_parts_of_both_stages_and_wanted_by_both() -> None:
    by_name = {each.output.name: each for each in cut().sums if each.output.kind == "gradient"}
    tie = by_name.pop("symbols.weight")
    assert not tie.is_local and tie.stages == (0, 1) and sorted(STAGE[part] for part in tie.parts) == [0, 1]
    assert by_name and all(each.is_local for each in by_name.values())
    sent = [node for (source, target, way), nodes in cut().transfers.items() if way == "B" for node in nodes]
    assert all(tuple(node.meta["val"].shape) != (6, 4) for node in sent), "nothing of the size of the parameter for each microbatch"


def test_sums_over_dp_are_taken_once_a_step() -> None:
    stages = cut(Mesh((("pp", 2), ("dp", 2))))
    gradients = [each for each in stages.sums if each.output.kind == "gradient"]
    assert all(any(node.target in LAUNCHES for node in each.after) for each in gradients)
    inside = [node for node in loop(stages) if node.target in LAUNCHES and PHASE[node] == "backward"]
    assert not inside, "none for each microbatch"
