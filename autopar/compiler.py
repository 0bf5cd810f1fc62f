"""The front door, and the compiler: one function that takes a model to a schedule, one list of passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.capture import BatchDims, capture
from autopar.check import Checker
from autopar.cluster import Cluster
from autopar.compiled import Compiled
from autopar.cost import CostModel
from autopar.manager import DecidingPass, History, Log, Pass, run_passes
from autopar.mesh import Mesh
from autopar.passes.cut_fragments import cut_fragments
from autopar.passes.decompose_losses import DecomposeLosses
from autopar.passes.find_atoms import FindAtoms
from autopar.passes.fold_no_ops import FoldNoOps
from autopar.passes.insert_reshards import InsertReshards
from autopar.passes.key_random import KeyRandom
from autopar.passes.lower import Lower
from autopar.passes.merge_equal_calls import MergeEqualCalls
from autopar.passes.refine_mesh import RefineMesh
from autopar.passes.trace_joint import TraceJoint
from autopar.passes.unify_attention import UnifyAttention
from autopar.passes.views_of_chunks import ViewsOfChunks
from autopar.program import Program


@dataclass(frozen=True)
class Options:
    """What the user asked of one compile."""

    outputs: str | None = None
    batch_dims: BatchDims = None
    device: str = "cpu"


def forward_passes(options: Options) -> tuple[Pass | DecidingPass, ...]:
    return (
        DecomposeLosses(),  # before the trace: autograd then derives backwards whose sums are explicit
        UnifyAttention(),  # before the keys: dropout inside attention becomes a site of its own
        KeyRandom(),
    )


def global_passes(options: Options, training: bool, choose: DecidingPass) -> tuple[Pass | DecidingPass, ...]:
    return (
        TraceJoint(training),
        ViewsOfChunks(),  # makes equal calls (three views of one qkv) out of different ones, so before merging
        FoldNoOps(),
        MergeEqualCalls(),
        FindAtoms(),
        RefineMesh(),  # needs atoms; the search needs the final axes
        choose,
        InsertReshards(),
        Lower(options.device),
    )


def compile_program(forward: Program, options: Options, training: bool, choose: DecidingPass) -> Program:
    return run_passes(forward, forward_passes(options) + global_passes(options, training, choose))
