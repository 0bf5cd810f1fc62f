"""Sends and receives between real ranks: equal to those of virtual ranks, and a peer that is gone or late is named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar.errors import AutoparError, PeerError
from autopar.ir.instructions import parse
from autopar.ir.mesh import Mesh
from autopar.ir.program import Signature
from autopar.ir.schedule import Fragment, Schedule, TensorType
from autopar.runtime.execute.distributed import DistributedTransport
from autopar.runtime.execute.fragments import CompiledFragments
from autopar.runtime.execute.interpreter import RankState, execute
from autopar.runtime.execute.process_groups import ProcessGroups
from autopar.runtime.execute.virtual import Rendezvous, VirtualTransport, drive
from tests.support.schedules import buffers_of

STAGES = Mesh((("pp", 2), ("dp", 2)))
SHAPES: dict[str, TensorType] = {
    "h": ((3, 2), torch.float32),
    "mask": ((2, 3), torch.bool),
    "none": ((0, 4), torch.float32),
    "one": ((), torch.int64),
    "d": ((3, 2), torch.bfloat16),
}
# Both ranks of a pair send before they receive; the second rank waits in another order than it launched.
FIRST = """
RUN ahead (x) -> (h@0, mask, none, one)
SEND 0F0>1 pp=1 (h@0, mask, none, one)
SEND 0F1>1 pp=1 (h@0)
RECV 1B0>0 pp=1 (d@0)
RECV 1B1>0 pp=1 (d@1)
WAIT 0F0>1
WAIT 1B0>0
ADD g (d@0)
WAIT 1B1>0
ADD g (d@1)
WAIT 0F1>1
FREE h@0 mask none one d@0 d@1
LAUNCH all_gather copy dp (g) -> all
WAIT all
"""
LAST = """
RUN back (x) -> (d@0)
SEND 1B0>0 pp=0 (d@0)
SEND 1B1>0 pp=0 (d@0)
RECV 0F0>1 pp=0 (h@0, mask, none, one)
RECV 0F1>1 pp=0 (h@1)
WAIT 0F1>1
WAIT 0F0>1
WAIT 1B1>0
WAIT 1B0>0
FREE d@0
"""


def ahead(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.t(), x > 0, x.new_zeros(0, 4), x.sum().long()


def back(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x.t().bfloat16() * 4,)


FRAGMENTS = {function.__name__: Fragment(function.__name__, torch.fx.symbolic_trace(function)) for function in (ahead, back)}


def schedules() -> list[Schedule]:
    return [
        Schedule(parse(text), FRAGMENTS, ("x",), (), Signature((), ()), buffers_of(text, SHAPES)) for text in (FIRST, FIRST, LAST, LAST)
    ]


def held(rank: int) -> RankState:
    return RankState({"x": torch.arange(6.0).view(2, 3) - rank})


def groups_of(mesh: Mesh, timeout: float, ranks: list[Schedule]) -> ProcessGroups:
    device_mesh = init_device_mesh("cpu", tuple(size for _, size in mesh.axes), mesh_dim_names=mesh.names)
    groups = ProcessGroups(device_mesh, timeout=timeout)
    groups.create(mesh, [(name,) for name in mesh.names])
    groups.create_channels({channel for rank, schedule in enumerate(ranks) for channel in schedule.channels(mesh, rank)})
    return groups


def exchanged() -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transport = DistributedTransport(groups_of(STAGES, 30, schedules()), STAGES)
        state = held(transport.rank)
        assert list(execute(schedules()[transport.rank], state, CompiledFragments(FRAGMENTS, "eager"), transport)) == []
    return state.buffers


def test_stages_exchange_both_ways_as_virtual_ranks_do(gloo_ranks: Any) -> None:
    rendezvous, states = Rendezvous(STAGES), [held(rank) for rank in range(4)]
    fragments = CompiledFragments(FRAGMENTS, "eager")
    drive([execute(each, states[rank], fragments, VirtualTransport(rendezvous, rank)) for rank, each in enumerate(schedules())])
    assert states[2].buffers["mask"].dtype == torch.bool and states[2].buffers["none"].shape == (0, 4)
    for state, buffers in zip(states, gloo_ranks.run(exchanged), strict=True):
        assert buffers.keys() == state.buffers.keys()
        for name, value in state.buffers.items():
            assert buffers[name].dtype == value.dtype and torch.equal(buffers[name], value), name


def late_peer(text: str) -> tuple[str, list[str], float]:
    """All but the last rank stand at `text`, on a line of four stages with a timeout of one second; the last one does nothing."""
    mesh = Mesh((("pp", 4),))
    schedule = Schedule(parse(text), {}, (), (), Signature((), ()), buffers_of(text, SHAPES))
    device_mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    groups = ProcessGroups(device_mesh, timeout=1)
    groups.create_channels([(rank, 3) for rank in range(3)] + [(3, rank) for rank in range(3)])
    if groups.rank == 3:
        dist.barrier()
        return "", [], 0.0
    start = time.monotonic()
    with pytest.raises(PeerError) as caught:
        list(execute(schedule, RankState({"x": torch.zeros(1)}), CompiledFragments({}, "eager"), DistributedTransport(groups, mesh)))
    seconds = time.monotonic() - start
    dist.barrier()
    return str(caught.value), caught.value.__notes__, seconds


@pytest.mark.parametrize(
    ("instruction", "name", "peers"),
    [
        ("RECV 3B2 pp=3 (h@2)", "3B2", {0: "rank 3", 1: "rank 3", 2: "rank 3"}),
        ("LAUNCH all_reduce sum pp (x) -> y", "y", {0: "ranks 1, 2, 3", 1: "ranks 0, 2, 3", 2: "ranks 0, 1, 3"}),
    ],
)
def test_a_late_peer_is_named_within_the_timeout(gloo_ranks: Any, instruction: str, name: str, peers: dict[int, str]) -> None:
    answers = gloo_ranks.run(late_peer, f"{instruction}\nWAIT {name}")
    for rank, others in peers.items():
        message, notes, seconds = answers[rank]
        assert message.startswith(f"rank {rank} got no answer from {others} for {instruction}: "), message
        assert f"on rank {rank}, instruction 1: WAIT {name}" in notes
        assert seconds < 5


def test_a_peer_error_is_caught_as_ours_and_as_torchs() -> None:
    assert issubclass(PeerError, AutoparError) and issubclass(PeerError, RuntimeError)


# ---- a rank that dies: two processes of their own


def survive(rank: int, rendezvous: str) -> None:
    """Rank 0 dies in the middle of a step; rank 1 prints what it hears of it, waiting for a value and then sending one."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    mesh = Mesh((("pp", 2),))
    texts = (
        "SEND 0F0>1 pp=1 (x)\nWAIT 0F0>1",
        "RECV 0F0>1 pp=0 (h@0)\nWAIT 0F0>1\nRECV 0F1>1 pp=0 (h@1)\nWAIT 0F1>1",
        "SEND 1B0>0 pp=0 (h@0)\nWAIT 1B0>0",
    )
    given, taken, back = (Schedule(parse(text), {}, (), (), Signature((), ()), buffers_of(text, SHAPES)) for text in texts)
    groups = groups_of(mesh, 60, [given, back])
    transport, fragments = DistributedTransport(groups, mesh), CompiledFragments({}, "eager")
    state = RankState({"x": torch.ones(3, 2)})
    if rank == 0:
        list(execute(given, state, fragments, transport))
        time.sleep(0.3)
        os._exit(1)
    start = time.monotonic()
    with pytest.raises(PeerError) as caught:
        list(execute(taken, state, fragments, transport))
    assert state.buffers["h@0"].sum() == 6 and time.monotonic() - start < 30
    print("receiving:", caught.value, *caught.value.__notes__, flush=True)
    with pytest.raises(PeerError) as caught:
        list(execute(back, RankState(state.buffers), fragments, transport))
    print("sending:", caught.value, flush=True)
    os._exit(0)


@pytest.mark.slow
def test_a_rank_that_dies_is_named_long_before_the_timeout(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "rendezvous")], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        told = processes[1].communicate(timeout=60)[0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert processes[1].returncode == 0
    assert "receiving: rank 1 got no answer from rank 0 for RECV 0F1>1 pp=0 (h@1): " in told
    assert "on rank 1, instruction 3: WAIT 0F1>1" in told
    assert "sending: rank 1 got no answer from rank 0 for SEND 1B0>0 pp=0 (h@0): " in told


if __name__ == "__main__":
    survive(int(sys.argv[1]), sys.argv[2])
