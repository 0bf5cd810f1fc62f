"""Which collectives go together, how far each is delayed, and that the results are the same to the bit."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import virtual_mesh
from autopar.compiler import default_passes
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.cost.schedule_memory import peak_bytes_on_processes
from autopar.driver.manager import run_passes
from autopar.driver.options import Options
from autopar.errors import ScheduleError
from autopar.ir.actions import SINGLE
from autopar.ir.instructions import Free, Launch, Run, Wait
from autopar.ir.mesh import Mesh
from autopar.ir.program import Input, Signature
from autopar.ir.schedule import Schedule
from autopar.passes.schedule.bucket_collectives import BucketCollectives
from autopar.passes.schedule.free_buffers import FreeBuffers
from autopar.passes.schedule.order_actions import OrderActions
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.schedules import generate
from autopar.plans.decisions import BucketSizes
from autopar.plans.plan import Plan
from tests.support.buckets import random_buckets
from tests.support.programs import forward_program, global_program, inputs_of, passed, random_local, run_schedule
from tests.support.schedules import check_schedules, retyped, schedule_of, scheduled, whole

DP2, WIDTH, LAYERS = Mesh((("dp", 2),)), 8, 12
BYTES = 4 * (WIDTH * WIDTH + WIDTH)  # of the gradients of a layer


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().sum()


BATCH = (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)),)


def unbucketed(number: int = 1) -> ScheduleProgram:
    """A data-parallel step before collectives are joined."""
    local = passed(Layers(), BATCH, None, DP2, number, SINGLE if number == 1 else generate("1f1b", 1, number))
    passes = default_passes(Options(Cluster.ideal()), training=True)
    first, last = (next(n for n, each in enumerate(passes) if isinstance(each, kind)) for kind in (OrderActions, BucketCollectives))
    return run_passes(local, passes[first:last])


def bucketed(program: ScheduleProgram, size: int) -> Schedule:
    return FreeBuffers().apply(BucketCollectives(Cluster.ideal()).apply(program, BucketSizes({"dp": size}))).places[0]


def gradient_launches(schedule: Schedule) -> list[Launch]:
    left = {name for item, name in zip(schedule.signature.outputs, schedule.outputs, strict=True) if item.kind == "gradient"}
    runs = [each for each in schedule.instructions if isinstance(each, Run)]
    shown = {name for each in runs if left.intersection(each.outputs) for name in each.inputs} | left
    return [each for each in schedule.instructions if isinstance(each, Launch) and shown.intersection(each.targets)]


def num_bytes(launch: Launch, schedule: Schedule) -> int:
    layouts = [schedule.type_of(name) for name in launch.sources]
    return sum(math.prod(layout[0]) * layout[1].itemsize for layout in layouts if layout)


def runs_before(schedule: Schedule, what: object) -> int:
    position = next(n for n, each in enumerate(schedule.instructions) if each == what)
    return sum(isinstance(each, Run) for each in schedule.instructions[:position])


def test_gradients_go_together_up_to_the_limit_while_the_backward_goes_on() -> None:
    schedule = bucketed(unbucketed(), 4 * BYTES)
    launches = gradient_launches(schedule)
    assert sum(len(each.sources) for each in launches) == 2 * LAYERS
    assert len(launches) < LAYERS
    assert max(num_bytes(each, schedule) for each in launches) <= 4 * BYTES
    backward = sum(isinstance(each, Run) for each in schedule.instructions)
    assert runs_before(schedule, launches[0]) < backward // 2 + LAYERS // 2 < backward
    first_wait = min(runs_before(schedule, Wait(each.name)) for each in launches)
    assert first_wait >= runs_before(schedule, launches[-1]), "nothing waits before all are under way"


def test_buckets_shrink_towards_the_end() -> None:
    schedule = bucketed(unbucketed(), 2**30)
    sizes = [len(each.sources) for each in gradient_launches(schedule)]
    assert sizes[0] > sizes[-1]
    assert len(sizes) > 2, "one bucket for all would start when nothing is left to hide it"


def test_a_limit_below_two_gradients_joins_nothing() -> None:
    program = unbucketed()
    assert BucketCollectives(Cluster.ideal()).apply(program, BucketSizes({"dp": 1})) is program


def gradients(number: int, size: int) -> tuple[int, list[Tensor]]:
    """How many collectives bring them, and what they are."""
    model, options = Layers(), {"backend": "eager", "num_microbatches": number, "plan": Plan(DP2, buckets={"dp": size})}
    parallel = autopar.compile(model, virtual_mesh(dp=2), example_inputs=BATCH, **options)
    parallel(*BATCH).backward()
    return len(gradient_launches(parallel.compiled.schedules[0])), [p.grad for p in parallel.parameters() if p.grad is not None]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("size", [BYTES, 3 * BYTES + 5, 2**30])
def test_results_are_equal_to_the_bit(size: int, number: int) -> None:
    num_plain, plain = gradients(number, 1)
    num_launches, found = gradients(number, size)
    assert num_launches < num_plain == len(plain) == 2 * LAYERS
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


def test_a_collective_that_is_waited_for_at_once_is_not_delayed() -> None:
    schedule = schedule_of(
        """
        RUN f (x) -> (a)
        LAUNCH all_reduce sum tp (a) -> b
        RUN f (x) -> (c)
        LAUNCH all_reduce sum tp (c) -> d
        WAIT b
        WAIT d
        RUN g (b, d) -> (y)
        LAUNCH all_reduce sum tp (y) -> y1
        LAUNCH all_reduce sum tp (x) -> x1
        WAIT y1
        WAIT x1
        """,
        "x",
        "y1 x1",
    )
    typed = replace(schedule, buffers={name: each._replace(type=((4,), torch.float32)) for name, each in schedule.buffers.items()})
    program = ScheduleProgram(Mesh((("tp", 2),)), generate("1f1b", 1, 1), (typed,))
    found = BucketCollectives(Cluster.ideal()).apply(program, BucketSizes({"tp": 2**20})).places[0]
    assert [str(each) for each in found.instructions if isinstance(each, (Launch, Wait))] == [
        "LAUNCH all_reduce sum tp (a) -> b",
        "LAUNCH all_reduce sum tp (c) -> d",
        "WAIT b",
        "WAIT d",
        "LAUNCH all_reduce sum tp (y, x) -> (y1, x1)",
        "WAIT y1",
    ]


def test_the_plan_says_how_large_buckets_are_and_is_kept() -> None:
    parallel = autopar.compile(Layers(), virtual_mesh(dp=2), example_inputs=BATCH, backend="eager", cluster="cpu")
    plan = Plan.from_json(parallel.plan.to_json())
    assert plan.buckets == parallel.plan.buckets != {}
    again = autopar.compile(
        Layers(), virtual_mesh(dp=2), example_inputs=BATCH, backend="eager", cluster="cpu", plan=replace(plan, buckets={"dp": BYTES})
    )
    schedule = again.compiled.schedules[0]
    assert again.plan.buckets["dp"] == BYTES
    assert max(num_bytes(each, schedule) for each in gradient_launches(schedule)) <= BYTES


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_random_plans_stay_exact(seed: int) -> None:
    """Whatever is split how: what is joined is what one group adds up in one dtype."""
    model, mesh = Layers(), Mesh((("dp", 2), ("tp", 2)))
    program = global_program(forward_program(model, {}, mesh, *BATCH))
    local = random_local(program, seed)
    passes = default_passes(Options(Cluster.ideal()), training=True)
    first = next(n for n, each in enumerate(passes) if isinstance(each, OrderActions))
    inputs = inputs_of(local, model, BATCH, {})
    with_buckets, without = (
        run_passes(local, [each for each in passes[first:] if keeps or not isinstance(each, BucketCollectives)]) for keeps in (True, False)
    )
    got, wanted = (run_schedule(each.places[0], local.mesh, inputs) for each in (with_buckets, without))
    assert all(torch.equal(got[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_any_legal_partition_is_exact(seed: int, number: int) -> None:
    """Whatever goes together, results are those of reductions apart, to the bit."""
    model, mesh = Layers(), Mesh((("dp", 2), ("tp", 2)))
    order = SINGLE if number == 1 else generate("1f1b", 1, number)
    batch = (torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1)),)
    before = scheduled(passed(model, batch, None, mesh, number, order), joins=False)
    unfreed = before.with_places([without_frees(each) for each in before.places])
    together = random_buckets(unfreed, seed)
    joined = FreeBuffers().apply(BucketCollectives(Cluster.ideal()).apply(unfreed, together))
    assert any(isinstance(each, Launch) and len(each.sources) > 1 for each in joined.places[0].instructions)
    check_schedules(joined.places * mesh.size, mesh.ranks)
    inputs = inputs_of(before.cut.program, model, batch, {})
    wanted, got = (run_schedule(each.places[0], before.cut.program.mesh, inputs) for each in (before, joined))
    assert wanted and all(torch.equal(got[key], wanted[key]) for key in wanted)


def without_frees(schedule: Schedule) -> Schedule:
    return schedule.regrouped([[] if isinstance(each, Free) else [each] for each in schedule.instructions])


def test_what_cannot_go_together_is_refused() -> None:
    text = "LAUNCH all_reduce sum dp (a) -> b\nWAIT b\nLAUNCH all_reduce sum dp (b) -> c\nLAUNCH all_reduce max dp (a) -> d\nWAIT c\nWAIT d"
    schedule = retyped(schedule_of(text, "a", "c d"), {name: ((4,), torch.float32) for name in "abcd"})
    for names, why in (("bc", "LAUNCH all_reduce sum dp (b) -> c begins behind the first WAIT"), ("cd", "they are of 2 kinds")):
        with pytest.raises(ScheduleError, match=re.escape(why)):
            BucketCollectives(Cluster.ideal()).apply(whole(DP2, schedule), BucketSizes({}, together=(frozenset(names),)))


def test_a_bucket_has_collectives_of_one_microbatch() -> None:
    """All four are there before the first is waited for; one microbatch would wait for what the other computes."""
    names = ["a@0", "b@0", "a@1", "b@1"]
    lines = [f"LAUNCH all_reduce sum dp ({name}) -> s{name}" for name in names] + [f"WAIT s{name}" for name in names]
    schedule = schedule_of("\n".join(lines), " ".join(names), " ".join(f"s{name}" for name in names))
    typed = retyped(schedule, dict.fromkeys(schedule.buffers, ((4,), torch.float32)))
    found = BucketCollectives(Cluster.ideal()).apply(whole(DP2, typed), BucketSizes({"dp": 2**20})).places[0]
    assert [each.sources for each in found.instructions if isinstance(each, Launch)] == [("a@0", "b@0"), ("a@1", "b@1")]
    with pytest.raises(ScheduleError, match="they are of 2 kinds, axes, dtypes or microbatches"):
        BucketCollectives(Cluster.ideal()).apply(whole(DP2, typed), BucketSizes({}, together=(frozenset(("sa@0", "sa@1")),)))


def test_reduce_scatters_maxima_and_counts_go_together_each_with_their_own() -> None:
    kinds = ("all_reduce sum", "all_reduce max", "reduce_scatter sum")
    lines = [f"LAUNCH {kind} dp ({name}{n}) -> {name}{n}_1" for n, kind in enumerate(kinds) for name in "abij"]
    waits = [f"WAIT {name}{n}_1" for n in range(3) for name in "abij"]
    names = [f"{name}{n}" for n in range(3) for name in "abij"]
    schedule = schedule_of("\n".join([*lines, *waits]), " ".join(names), " ".join(f"{name}_1" for name in names))
    of_name = {name: torch.int64 if name[0] in "ij" else torch.float32 for name in schedule.buffers}
    typed = retyped(schedule, {name: ((3,) if name[1:] == "2_1" else (2, 3), dtype) for name, dtype in of_name.items()})
    found = BucketCollectives(Cluster.ideal()).apply(whole(DP2, typed), BucketSizes({"dp": 2**20})).places[0]
    launches = [each for each in found.instructions if isinstance(each, Launch)]
    assert [each.sources for each in launches] == [(f"{one}{n}", f"{two}{n}") for n in range(3) for one, two in ("ab", "ij")]


def test_a_size_is_the_best_of_the_cost_model_and_says_why() -> None:
    decision = BucketCollectives(Cluster.asked_for("cpu", DP2)).decide(unbucketed())
    total = 2 * LAYERS * BYTES // 2
    assert decision.bytes["dp"] >= total // 2, "the start of a collective takes longer than so few bytes"
    assert re.fullmatch(
        r"starts of 1 buckets take .* ms, .* ms, of which hiding it would save 30%; in 2 of .* it would be .* ms more",
        decision.reasons["dp"],
    )
    assert BucketCollectives(Cluster.ideal(), {"dp": 5}).decide(unbucketed()).bytes == {"dp": 5}


def test_what_takes_the_device_while_it_is_hidden_goes_into_fewer_buckets() -> None:
    cluster = Cluster.asked_for("cpu", DP2)
    idle, busy = (replace(cluster, inner=replace(cluster.inner, bytes_per_second=1e5, busy=share)) for share in (0.0, 0.9))
    sizes = [BucketCollectives(each).decide(unbucketed()).bytes["dp"] for each in (idle, busy)]
    assert sizes[0] < sizes[1]
    assert "hiding it would save 10%" in BucketCollectives(busy).decide(unbucketed()).reasons["dp"]


def test_buckets_are_halved_where_memory_does_not_suffice() -> None:
    """What goes into reduce-scatters together is copied."""
    lines = [f"RUN f (x) -> ({name})\nLAUNCH reduce_scatter sum dp ({name}) -> {name}_1" for name in "abcd"]
    text = "\n".join([*lines, *["RUN f (x) -> (y)"] * 8, *(f"WAIT {name}_1" for name in "abcd")]).replace("(y)", "(y{})")
    signature = Signature((Input("batch", "0", (2, 4), torch.float32),), ())
    schedule = schedule_of(text.format(*range(8)), "x", "a_1 b_1 c_1 d_1", signature)
    shapes = {name: (4,) if name.endswith("_1") else (2, 4) for name in schedule.buffers}
    program = whole(DP2, replace(retyped(schedule, {name: (shape, torch.float32) for name, shape in shapes.items()}), fragments={}))
    wide = BucketCollectives(Cluster.ideal()).decide(program)
    narrow = BucketCollectives(Cluster.ideal(), budget=MemoryBudget(1.0)).decide(program)
    assert narrow.bytes["dp"] < wide.bytes["dp"] and "do not fit" in narrow.reasons["dp"]
    joined = [BucketCollectives(Cluster.ideal()).apply(program, each).places[0] for each in (wide, narrow)]
    before = peak_bytes_on_processes(program.places[0])
    assert peak_bytes_on_processes(joined[0]) > before >= peak_bytes_on_processes(joined[1])
