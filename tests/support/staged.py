"""Programs on their way to a pipeline, as far as a test wants them: small models through the compiler's own passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from autopar.compiler import Options, default_passes
from autopar.cost.hardware.cluster import Cluster
from autopar.driver.manager import run_passes
from autopar.ir.keys import STAGE
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.global_.choose_microbatches import ChooseMicrobatches
from autopar.pipeline.actions import PipelineSchedule
from autopar.pipeline.schedules import generate
from tests.support.captures import kept_capture

PP2 = Mesh((("pp", 2),))


def passed(
    model: nn.Module, args: tuple[Any, ...], last: type | None, mesh: Mesh = PP2, number: int = 2, order: PipelineSchedule | None = None
) -> Program:
    """The program of `model` after pass `last` (None: after all), on the ideal cluster, in order 1f1b or the given one.

    Where the model mixes samples, each microbatch has its own statistics.
    """
    mesh = mesh.with_microbatches(number)
    order = order or generate("1f1b", mesh.size_of(mesh.parts("pp")), number)
    passes = default_passes(Options(Cluster.ideal(), microbatch_statistics="own"), torch.is_grad_enabled(), order=order)
    passes = [each for each in passes if not isinstance(each, ChooseMicrobatches)]  # there are so many from the start
    end = len(passes) if last is None else 1 + next(i for i, each in enumerate(passes) if isinstance(each, last))
    return run_passes(kept_capture(model, args, {}, mesh, None, dict.fromkeys(range(len(args)), 0)), passes[:end])


def calls(program: Program, target: Any) -> list[Node]:
    return [node for node in program.graph.nodes if node.op == "call_function" and node.target == target]


def by_stage(program: Program, choose: Callable[[Node], bool] = lambda node: True) -> Mapping[int | None, list[str]]:
    """Names of the calls, by their stage."""
    found: dict[int | None, list[str]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and choose(node):
            found.setdefault(STAGE.get(node), []).append(node.name)
    return found
