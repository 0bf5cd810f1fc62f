"""Any legal plan of any small graph is exact: random models, meshes, freedoms and strategies, in float64, on virtual ranks.

The model is compared as it stands, but where it drops out: there the FORWARD program on one device is, whose draws are ours. What
the front door makes of these models, step by step, is `test_random_models.py`.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from autopar.checks.checker import Checker, check_schedule_program
from autopar.compiler import Options, default_passes
from autopar.cost.hardware.cluster import Cluster
from autopar.driver.manager import History, Pass, run_passes
from autopar.errors import AutoparError
from autopar.graph.promote import default_float64
from autopar.ir.freedom import Freedom
from autopar.ir.mesh import Mesh, virtual_mesh
from autopar.ir.program import Program
from autopar.passes.forward.key_random import KeyRandom
from autopar.passes.global_.choose_shardings import ChooseShardings
from autopar.passes.global_.refine_mesh import RefineMesh
from autopar.testing.random_shardings import RandomShardings
from tests.support.programs import Values, errors_of, forward_program, inputs_of, run_forward, run_schedule
from tests.support.random_models.generate import random_model
from tests.support.random_models.model import RandomModel
from tests.support.random_models.shrink import shrink, smaller_models
from tests.support.random_models.steps import Step, runs

TOLERANCE = 1e-9
NUM_PLANS = 10
# Graphs of a number, and their calls.
QUICK, LONG = (4, 5), (10, 10)
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
    """What was tried: cases, graphs that were refused or cannot be compared, the nodes that were given a strategy, those that it
    splits, the largest error."""

    cases: int = 0
    refused: int = 0
    skipped: int = 0
    nodes: int = 0
    split: int = 0
    worst: float = 0.0

    def __str__(self) -> str:
        of_calls = f"{self.split / max(self.nodes, 1):.2f} of {self.nodes} ops split"
        return f"{self.cases} cases, {self.refused} graphs refused, {self.skipped} skipped, {of_calls}, worst error {self.worst:.2g}"


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


def reference_of(model: RandomModel) -> Reference | None:
    """None of a model whose gradients are nothing, or all cancel: errors would be relative to rounding."""
    module, batch = model.module(), model.inputs_of(1)
    history = History()
    program = run_passes(forward_program(module, batch, virtual_mesh(dp=1)), BEFORE, (history,))
    inputs = inputs_of(program, module, (), batch)
    inputs |= {("tangent", "0"): torch.ones(())}
    wanted = run_forward(history.program(KeyRandom), inputs) if model.drops else run_model(model)
    is_comparable = sum(float(value.norm()) for (kind, _), value in wanted.items() if kind == "gradient") > 1e-3
    return Reference(program, history.program(KeyRandom), inputs, wanted) if is_comparable else None


def run_model(model: RandomModel) -> Values:
    module = model.module()
    loss = module(**model.inputs_of(1))
    found: Values = {("loss", "0"): loss.detach()}
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not loss.requires_grad:
        return found
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return found | {("gradient", name): value for name, value in zip(trained, gradients, strict=True) if value is not None}


def run_plan(model: RandomModel, reference: Reference, plan: RandomPlan, tally: Tally, is_checked: bool) -> None:
    program = run_passes(reference.program.copy(mesh=plan.mesh, freedom=plan.freedom), (RefineMesh(),))
    shardings = RandomShardings(plan.seed, plan.calm)
    decision = shardings.decide(program)
    written = run_passes(shardings.apply(program, decision), AFTER, (Checker(),) if is_checked else ())
    check_schedule_program(written)
    found = run_schedule(written.places[0], program.mesh, reference.inputs)
    # Of a parameter that nothing reads there are zeros here, and nothing there; what becomes of buffers is nothing that the model returns.
    errors = errors_of({key: found[key] for key in reference.wanted}, reference.wanted)
    tally.cases += 1
    tally.nodes += program.num_nodes
    tally.split += sum(decision[node.name].num_shards > 1 for node in program.graph.nodes if node.op == "call_function")
    tally.worst = max(tally.worst, *errors.values())
    wrong = {key: error for key, error in errors.items() if not error <= max(TOLERANCE, model.tolerance)}
    if wrong:
        rounding = reference.rounding()
        wrong = {key: error for key, error in wrong.items() if not error <= 10 * rounding[key]}
    assert not wrong, f"{plan}: {wrong}"


def random_plans(seed: int) -> list[RandomPlan]:
    draw = random.Random(f"plans {seed}")
    return [RandomPlan(draw.choice(MESHES), draw.choice(FREEDOMS), draw.randrange(2**16), draw.choice(CALM)) for _ in range(NUM_PLANS)]


def try_plans(model: RandomModel, tally: Tally) -> None:
    """Those of the model's seed. What captures a model may refuse it; no plan of one that is captured is refused."""
    with default_float64():
        try:
            reference = reference_of(model) if runs(model, Step(1)) else None
        except AutoparError:
            tally.refused += 1
            return
        if reference is None:
            tally.skipped += 1
            return
        for number, plan in enumerate(random_plans(model.seed)):
            run_plan(model, reference, plan, tally, is_checked=number == 0)


def fails(model: RandomModel) -> bool:
    try:
        try_plans(model, Tally())
    except Exception:
        return True
    return False


def try_graphs(number: int, num_graphs: int, max_calls: int) -> Tally:
    """The plans of each of `num_graphs` graphs: those of `number`. Of one that fails the smallest part that fails is shown."""
    tally = Tally()
    for seed in range(number * num_graphs, (number + 1) * num_graphs):
        model = random_model(seed, max_calls, drops=True).of_loss()
        try:
            try_plans(model, tally)
        except Exception as error:
            error.add_note(f"seed {seed}, {max_calls} calls, of which this fails:\n{shrink(model, smaller_models, fails, seconds=60)}")
            raise
    assert tally.cases >= 0.7 * num_graphs * NUM_PLANS, str(tally)
    assert tally.split > 0.2 * tally.nodes, f"replicating everything is exact, too: {tally}"
    return tally


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2, 3, 4))])
def test_every_plan_of_a_small_graph_is_exact(number: int) -> None:
    """Forty cases for each number."""
    try_graphs(number, *QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(100, 150))
def test_every_plan_of_a_larger_graph_is_exact(number: int) -> None:
    """5,000 cases in all; `pytest -s` prints what `docs/random-graphs.md` records."""
    start = time.process_time()
    tally = try_graphs(number, *LONG)
    print(f"\n{number}: {tally}, {time.process_time() - start:.0f} s of CPU")
