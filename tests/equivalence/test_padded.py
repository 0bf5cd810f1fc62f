"""Vocabularies, heads and widths that do not divide: split all the same, exact, and of logical shape wherever a user looks."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.fx import Node

import autopar
from autopar import Cluster, ParallelModule, virtual_mesh
from autopar.checks.checker import Checker
from autopar.driver.manager import run_passes
from autopar.graph.promote import default_float64, promote
from autopar.ir.keys import DIMS, SHARDING, STRATEGY
from autopar.ir.program import Program, operands, results_of
from autopar.passes.global_.find_atoms import FindAtoms
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.passes.global_.pad_atoms import PadAtoms
from autopar.passes.global_.refine_mesh import RefineMesh
from autopar.passes.global_.trace_joint import TraceJoint
from autopar.passes.local.lower import Lower
from autopar.plans.plan import Plan
from autopar.reports.summary import contractions
from autopar.testing.random_shardings import RandomShardings
from tests.support.captures import compiled
from tests.support.models.zoo import Case, case, padding_mask, tokens
from tests.support.programs import (
    FORWARD_PASSES,
    SIMPLIFICATIONS,
    Values,
    assert_close,
    forward_program,
    inputs_of,
    run_forward,
    run_schedule,
)
from tests.support.schedules import scheduled

VOCABULARY = 97
TABLE = "transformer.wte.weight"
# Free links make ties of all ways to split the table; Megatron's is asked for.
MEGATRON = {TABLE: ("tp", None)}


def gpt2(num_heads: int = 4, dropout: float = 0.0) -> Case:
    """A tied vocabulary head, so the table gets two gradients; fused query, key and value."""
    config = transformers.GPT2Config(
        n_layer=1, n_embd=8 * num_heads, n_head=num_heads, vocab_size=VOCABULARY, n_positions=32, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False,
    )  # fmt: skip
    return case(transformers.GPT2LMHeadModel(config), tokens())


def llama() -> Case:
    """6 query heads on 3 key-value heads; a width of the feed-forward that does not divide."""
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=48, intermediate_size=95, num_attention_heads=6, num_key_value_heads=3, vocab_size=VOCABULARY,
        max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return case(transformers.LlamaForCausalLM(config), tokens())


def bert(dropout: float = 0.1) -> Case:
    """5 heads, dropout inside attention, a bias on the vocabulary, a padding mask."""
    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_size=40, intermediate_size=63, num_attention_heads=5, vocab_size=VOCABULARY, max_position_embeddings=32,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return case(transformers.BertForMaskedLM(config), tokens() | {"attention_mask": padding_mask()})


def shapes(node: Node) -> list[tuple[int, ...]]:
    """Of what a call reads and makes."""
    return [tuple(value.shape) for each in (node, *operands(node)) for value in results_of(each) if value is not None]


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_vocabulary_is_split_and_the_loss_with_it(tp: int) -> None:
    model = gpt2().to(torch.float32)
    parallel = compiled(model.model, {"tp": tp}, model.batch, pins=MEGATRON)
    report = parallel.verify(promote=True, **model.batch)
    assert report and report.worst <= 1e-9, str(report)
    grown = -(-VOCABULARY // tp) * tp
    assert parallel.plan.parameters[TABLE].sharding.describe(parallel.plan.parameters[TABLE].dims) == f"[{grown}@tp, 32]"
    assert 0.95 <= parallel.summary()["flops_split"] <= 1.0
    program = parallel.compiled.program
    heads = [node for node in contractions(program) if any(grown in shape for shape in shapes(node))]
    assert len(heads) >= 3 and {STRATEGY[node].num_shards for node in heads} == {tp}
    table = next(node for item, node in program.named_inputs() if item.name == TABLE)
    assert SHARDING[table][0].local_shape(DIMS[table][0], program.mesh) == (grown // tp, 32)


def test_training_follows_plain_torch_and_users_see_logical_shapes() -> None:
    model = gpt2().to(torch.float32)
    reference = copy.deepcopy(model.model).float()
    parallel = compiled(model.model, {"dp": 2, "tp": 2}, model.batch, pins=MEGATRON, outputs="all")
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3) for module in (parallel, reference)]
    for _ in range(2):
        outputs, wanted = parallel(**model.batch), reference(**model.batch)
        assert outputs.logits.shape == wanted.logits.shape == (8, 16, VOCABULARY)
        assert torch.allclose(outputs.logits, wanted.logits, atol=1e-4)
        # The logits' own tangent enters, too.
        for each, optimizer in zip((outputs, wanted), optimizers, strict=True):
            optimizer.zero_grad()
            (each.loss + each.logits.square().mean()).backward()
        gradient = parallel.get_parameter(TABLE).grad
        assert gradient is not None and gradient.shape == (VOCABULARY, 32)
        assert torch.allclose(gradient, reference.get_parameter(TABLE).grad, atol=1e-5)  # type: ignore[arg-type]
        for optimizer in optimizers:
            optimizer.step()
    for name, value in reference.state_dict().items():
        assert torch.allclose(parallel.full_state_dict()[name], value, atol=1e-5), name


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_an_id_past_the_end_is_refused_though_padding_stands_there(backend: str) -> None:
    table, head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY, bias=False)
    head.weight = table.weight
    ids = torch.arange(8).view(2, 4)
    parallel = compiled(nn.Sequential(table, head), {"tp": 2}, (ids,), pins={"0.weight": ("tp", None)}, backend=backend)
    assert torch.allclose(parallel(ids), head(table(ids)), atol=1e-5)
    assert parallel.plan.parameters["0.weight"].padding is not None
    for row in (-1, VOCABULARY, VOCABULARY + 1):
        with pytest.raises((IndexError, RuntimeError), match="out of range|out of bounds"):
            parallel(torch.where(ids == 3, row, ids))


def test_what_is_written_past_the_end_is_refused_though_padding_stands_there() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(16, VOCABULARY)

        def forward(self, x: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
            y = self.head(x)
            return (torch.zeros_like(y).scatter_add(-1, ids, counts) * y).sum(-1)

    model, ids = Counts(), torch.arange(12).view(4, 3)
    x, counts = torch.randn(4, 16), torch.randn(4, 3)
    parallel = compiled(model, {"tp": 2}, (x, ids, counts))
    assert parallel.plan.parameters["head.weight"].padding is not None
    assert torch.allclose(parallel(x, ids, counts), model(x, ids, counts), atol=1e-5)
    for row in (-1, VOCABULARY, VOCABULARY + 1):
        with pytest.raises(RuntimeError, match="out of bounds"):
            parallel(x, torch.where(ids == 3, row, ids), counts)


def test_three_heads_are_split_over_two_ranks() -> None:
    model = gpt2(num_heads=3).to(torch.float32)
    parallel = compiled(model.model, {"tp": 2}, model.batch)
    report = parallel.verify(promote=True, **model.batch)
    assert report and report.worst <= 1e-9, str(report)
    placed = parallel.plan.parameters["transformer.h.0.attn.c_attn.weight"]
    assert placed.padding is not None and placed.padding.before == ((24,), (3, 3, 8)) and placed.dims == ((24,), (3, 4, 8))


def test_the_same_plan_pads_alike() -> None:
    model = gpt2().to(torch.float32)
    plan = Plan.from_json(compiled(model.model, {"tp": 2}, model.batch, pins=MEGATRON).plan.to_json())
    again = compiled(model.model, {"tp": 2}, model.batch, plan=plan)
    assert again.plan.strategies == plan.strategies and again.plan.parameters == plan.parameters
    assert plan.parameters[TABLE].padding is not None
    elsewhere = compiled(model.model, {"tp": 4}, model.batch, pins=plan.pins())
    assert elsewhere.plan.parameters[TABLE].sharding == plan.parameters[TABLE].sharding
    assert elsewhere.plan.parameters[TABLE].dims == ((100,), (32,))


def test_later_captures_find_the_parameters_as_they_lie() -> None:
    """Another length, no labels, and what cannot take padding: a softmax over the vocabulary as the model's output."""

    class Probabilities(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(16, VOCABULARY)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.head(x)
            return scores if self.training else scores.softmax(-1)

    torch.manual_seed(0)
    model, x = Probabilities(), torch.randn(8, 16)
    reference = copy.deepcopy(model)
    parallel = autopar.compile(
        model, virtual_mesh(tp=2), example_inputs=(x,), backend="eager", cluster=Cluster.ideal(), pins={"head.weight": ("tp", None)}
    )
    assert torch.allclose(parallel(x), reference(x), atol=1e-6)
    parallel.eval(), reference.eval()
    for batch in (x, x[:4]):
        assert torch.allclose(parallel(batch), reference(batch), atol=1e-6)
        assert parallel.plan.parameters["head.weight"].dims == ((98,), (16,))
        parallel(batch).square().sum().backward()
        reference(batch).square().sum().backward()
    for mine, other in zip(parallel.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine.grad, other.grad, atol=1e-6)  # type: ignore[arg-type]


# ---- any legal plan of a padded program is exact

MODELS = {"gpt2": lambda: gpt2(3), "llama": llama, "bert": bert}


@cache
def reference_of(name: str) -> tuple[Program, Values, Values]:
    model = MODELS[name]()
    forward = promote(run_passes(forward_program(model.model, model.batch, virtual_mesh(dp=1)), FORWARD_PASSES))
    inputs = inputs_of(forward, model.model, (), model.batch)
    with default_float64():
        return forward, inputs, run_forward(forward, inputs)


def assert_random_plans_are_exact(name: str, seeds: range) -> None:
    """With everything padded that can be, at whatever price."""
    forward, inputs, wanted = reference_of(name)
    with default_float64():
        for seed in seeds:
            mesh = (virtual_mesh(dp=2, tp=2), virtual_mesh(tp=4))[seed % 2]
            passes = (TraceJoint(True), *SIMPLIFICATIONS, FindAtoms(), PadAtoms(limit=8.0, least=0.0), RefineMesh())
            program = run_passes(forward.copy(mesh=mesh), passes)
            assert len([item for item in program.signature.inputs if item.padding]) >= 4
            local = run_passes(program, (RandomShardings(seed), InsertReshards(), Lower()), (Checker(),))
            tangents = {("tangent", item.name): wanted["loss", "0"].new_ones(()) for item in local.signature.inputs_of("tangent")}
            assert_close(run_schedule(scheduled(local).places[0], local.mesh, inputs | tangents), wanted, 1e-10)


@pytest.mark.parametrize("name", ["gpt2"])
def test_a_random_plan_is_exact(name: str) -> None:
    assert_random_plans_are_exact(name, range(1))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_twenty_random_plans_are_exact(name: str) -> None:
    assert_random_plans_are_exact(name, range(20))


# ---- on real ranks


def trains() -> dict[str, Any]:
    """Four ranks, dp = 2 and tp = 2; each feeds half of the batch. What differs from plain torch, by name, and how the table lies."""
    torch.manual_seed(0)
    model = gpt2(num_heads=3)
    reference, batch = copy.deepcopy(model.model), model.batch
    share = {name: value.chunk(2)[dist.get_rank() // 2] for name, value in batch.items()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel = autopar.compile(
        model.model, mesh, example_inputs=share, backend="eager", cluster=Cluster.ideal(), pins=MEGATRON, timeout=180
    )
    table = parallel.get_parameter(TABLE)
    assert isinstance(table, DTensor)
    found: dict[str, Any] = {"shape": tuple(table.shape), "rows": table.to_local().shape[0]}
    found["padded"] = [name for name, placed in parallel.plan.parameters.items() if placed.padding]
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3) for module in (parallel, reference)]
    errors = dict[str, float]()
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        parallel(**share).loss.backward()
        reference(**batch).loss.backward()
        gradient = parallel.get_parameter(TABLE).grad
        assert isinstance(gradient, DTensor)
        errors[f"gradient {step}"] = float((gradient.full_tensor() - reference.get_parameter(TABLE).grad).abs().max())
        norms = [parallel.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(reference.parameters(), 0.5)]
        errors[f"norm {step}"] = abs(float(norms[0] - norms[1]))
        for optimizer in optimizers:
            optimizer.step()
    errors |= state_errors(parallel, reference.state_dict())
    assert parallel.verify(promote=True, **share)
    return found | {"errors": errors}


def state_errors(parallel: ParallelModule, wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """The whole state; and loaded again, whole and in parts."""

    def error() -> float:
        full = parallel.full_state_dict()
        return max(float((full[name] - value).abs().max()) for name, value in wanted.items())

    parts = {name: value.clone() for name, value in parallel.state_dict().items()}
    found = {"full state": error()}
    parallel.load_state_dict({name: value + 1 for name, value in wanted.items()})
    parallel.load_state_dict(wanted)
    found["whole state loaded"] = error()
    parallel.load_state_dict({name: value + 1 for name, value in wanted.items()})
    parallel.load_state_dict(parts)
    return found | {"parts loaded": error()}


def test_real_ranks_hold_no_padding(gloo_ranks: Any) -> None:
    found = gloo_ranks.run(trains)
    assert [each["rows"] for each in found] == [49, 48, 49, 48]
    for each in found:
        assert each["shape"] == (VOCABULARY, 24) and each["padded"] == [TABLE], "heads are no whole dim"
        assert max(each["errors"].values()) <= 1e-6, each["errors"]


def test_volumes_of_a_padded_batch_are_split() -> None:
    """What masks the padding of five dims is split as it is of four."""

    class Volumes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.linear = nn.Conv3d(3, 16, 3, 2, 1), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.convolution(x).flatten(2).transpose(1, 2)).square().mean()

    x = torch.randn(6, 3, 4, 8, 8, dtype=torch.float64)
    parallel = compiled(Volumes().double(), {"dp": 4}, (x,))
    assert parallel.verify(x).worst <= 1e-9
    assert parallel.summary()["flops_split"] == pytest.approx(6 / 8)
