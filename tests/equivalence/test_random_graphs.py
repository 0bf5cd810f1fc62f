"""Any legal plan of any small graph is exact: random models, meshes, freedoms and strategies, in float64, on virtual ranks.

The model is compared as it stands, but where it drops out: there the FORWARD program on one device is, whose draws are ours.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.checks.checker import Checker, check_schedule_program
from autopar.compiler import Options, default_passes
from autopar.cost.hardware.cluster import Cluster
from autopar.driver.manager import History, Pass, run_passes
from autopar.graph.promote import default_float64
from autopar.ir.freedom import Freedom
from autopar.ir.mesh import Mesh, virtual_mesh
from autopar.ir.program import Program
from autopar.passes.forward.key_random import KeyRandom
from autopar.passes.global_.choose_shardings import ChooseShardings
from autopar.passes.global_.refine_mesh import RefineMesh
from autopar.testing.random_shardings import RandomShardings
from tests.support.models.random import RandomGraph
from tests.support.models.random_calls import MAX_CALLS, random_graphs
from tests.support.programs import Values, errors_of, forward_program, inputs_of, run_forward, run_schedule

TOLERANCE = 1e-9
# Cases of a number: graphs, and plans of each.
QUICK, LONG = (3, 10), (10, 10)
PHASES = (Phase.generate, Phase.shrink)
MESHES = tuple(
    virtual_mesh(**axes)
    for axes in (
        {"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2}, {"tp": 4}, {"tp": 3}, {"dp": 4}, {"dp": 2, "tp": 3}, {"tp": 6}, {"dp": 2, "tp": 4},
        {"dp": 4, "tp": 2},
    )
)  # fmt: skip
FREEDOMS = (Freedom(), Freedom(), Freedom(flexible=("tp",)), Freedom(shards_parameters=True), Freedom(flexible=("tp", "dp")))
# Half of the plans change their minds at nearly every op, half of them seldom.
CALM = (0.0, 0.7, 0.9, 0.95)


@dataclass(frozen=True)
class RandomPlan:
    mesh: Mesh
    freedom: Freedom
    seed: int
    calm: float = 0.0


@dataclass
class Tally:
    """What was tried: cases, the nodes that were given a strategy, those that it splits, the collectives, the largest error."""

    cases: int = 0
    nodes: int = 0
    split: int = 0
    worst: float = 0.0

    def __str__(self) -> str:
        return f"{self.cases} cases, {self.split / max(self.nodes, 1):.2f} of {self.nodes} ops split, worst error {self.worst:.2g}"


def _passes() -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    """The compiler's own passes before and after the search; the last before it looks at the mesh."""
    passes = default_passes(Options(Cluster.ideal()), training=True)
    search = next(i for i, each in enumerate(passes) if isinstance(each, ChooseShardings))
    assert isinstance(passes[search - 1], RefineMesh)
    return passes[: search - 1], passes[search + 1 :]


BEFORE, AFTER = _passes()


@dataclass(frozen=True)
class Reference:
    """The GLOBAL program of a graph with atoms, for a mesh of one rank, its inputs, and the values that are wanted."""

    program: Program
    forward: Program
    inputs: Values
    wanted: Values

    def rounding(self) -> dict[tuple[str, str], float]:
        """The largest errors that the last bits of the parameters make: what is zero by cancellation is nothing else."""
        worst: dict[tuple[str, str], float] = {}
        for number in range(5):
            draw = torch.Generator().manual_seed(number)

            def nudged(value: Tensor, draw: torch.Generator = draw) -> Tensor:
                return value * (1 + torch.finfo(value.dtype).eps * (2 * torch.randint(0, 2, value.shape, generator=draw) - 1))

            inputs = {key: nudged(value) if key[0] == "parameter" else value for key, value in self.inputs.items()}
            errors = errors_of(run_forward(self.forward, inputs), self.wanted)
            worst = {key: max(worst.get(key, 0.0), error) for key, error in errors.items()}
        return worst


def reference_of(graph: RandomGraph) -> Reference:
    model, batch = graph.model(), graph.batch()
    history = History()
    program = run_passes(forward_program(model, batch, virtual_mesh(dp=1)), BEFORE, (history,))
    inputs = inputs_of(program, model, (), batch)
    inputs |= {("tangent", "0"): torch.ones(())}
    wanted = run_forward(history.program(KeyRandom), inputs) if graph.drops else run_model(model, batch)
    return Reference(program, history.program(KeyRandom), inputs, wanted)


def run_model(model: nn.Module, batch: dict[str, Tensor]) -> Values:
    loss = model(**batch)
    assume(loss.requires_grad)
    names = [name for name, _ in model.named_parameters()]
    gradients = torch.autograd.grad(loss, [model.get_parameter(name) for name in names], allow_unused=True)
    found: Values = {("loss", "0"): loss.detach()}
    return found | {("gradient", name): value for name, value in zip(names, gradients, strict=True) if value is not None}


def run_plan(reference: Reference, plan: RandomPlan, tally: Tally, is_checked: bool) -> None:
    program = run_passes(reference.program.copy(mesh=plan.mesh, freedom=plan.freedom), (RefineMesh(),))
    random = RandomShardings(plan.seed, plan.calm)
    decision = random.decide(program)
    written = run_passes(random.apply(program, decision), AFTER, (Checker(),) if is_checked else ())
    check_schedule_program(written)
    errors = errors_of(run_schedule(written.places[0], program.mesh, reference.inputs), reference.wanted)
    tally.cases += 1
    tally.nodes += program.num_nodes
    tally.split += sum(decision[node.name].num_shards > 1 for node in program.graph.nodes if node.op == "call_function")
    tally.worst = max(tally.worst, *errors.values())
    wrong = {key: error for key, error in errors.items() if not error <= TOLERANCE}
    if wrong:
        rounding = reference.rounding()
        wrong = {key: error for key, error in wrong.items() if not error <= 10 * rounding[key]}
    assert not wrong, f"{plan}: {wrong}"


def try_plans(graph: RandomGraph, plans: Sequence[RandomPlan], tally: Tally) -> None:
    with default_float64():
        reference = reference_of(graph)
        # Where nothing has a gradient, or all of it cancels, errors are relative to rounding.
        assume(sum(float(value.norm()) for (kind, _), value in reference.wanted.items() if kind == "gradient") > 1e-3)
        for number, plan in enumerate(plans):
            run_plan(reference, plan, tally, is_checked=number == 0)


PLAN = st.builds(RandomPlan, st.sampled_from(MESHES), st.sampled_from(FREEDOMS), st.integers(0, 2**16), st.sampled_from(CALM))


def try_graphs(number: int, max_calls: int, num_graphs: int, num_plans: int) -> Tally:
    """`num_plans` plans for each of `num_graphs` graphs: those of `number`."""
    tally = Tally()

    # A seed, not `derandomize`, which would draw the same graphs for every number.
    @seed(number)
    @settings(
        max_examples=num_graphs, database=None, deadline=None, suppress_health_check=list(HealthCheck), phases=PHASES, print_blob=False
    )
    @given(random_graphs(max_calls), st.lists(PLAN, min_size=num_plans, max_size=num_plans))
    def every_plan_is_exact(graph: RandomGraph, plans: list[RandomPlan]) -> None:
        try_plans(graph, plans, tally)

    every_plan_is_exact()
    assert tally.cases >= num_graphs * num_plans
    assert tally.split > 0.4 * tally.nodes, f"replicating everything is exact, too: {tally}"
    return tally


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2, 3, 4))])
def test_every_plan_of_a_small_graph_is_exact(number: int) -> None:
    """Thirty cases for each number."""
    try_graphs(number, 5, *QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(100, 150))
def test_every_plan_of_a_larger_graph_is_exact(number: int) -> None:
    """5,000 cases in all; `pytest -s` prints what `docs/random-graphs.md` records."""
    start = time.process_time()
    tally = try_graphs(number, MAX_CALLS, *LONG)
    print(f"\n{number}: {tally}, {time.process_time() - start:.0f} s of CPU")
