"""Every optimizer of torch.optim, and some that torch does not have, on every kind of mesh: the parameters of a plain run on one device,
or a refusal that names the optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import AutoparError
from tests.support.models.trained import Lamb, Lars, Sm3, batch, muon, small_gpt

Make = Callable[[Any], torch.optim.Optimizer]
OPTIM = torch.optim
OPTIMIZERS: dict[str, Make] = {
    "Adadelta": OPTIM.Adadelta,
    "Adafactor": OPTIM.Adafactor,
    "Adagrad": OPTIM.Adagrad,
    "Adam": partial(OPTIM.Adam, weight_decay=0.1),
    "Adam of largest squares": partial(OPTIM.Adam, amsgrad=True),
    "AdamW": OPTIM.AdamW,
    "AdamW, fused": partial(OPTIM.AdamW, fused=True),
    "AdamW, foreach": partial(OPTIM.AdamW, foreach=True),
    "Adamax": OPTIM.Adamax,
    "ASGD": OPTIM.ASGD,
    "LBFGS": partial(OPTIM.LBFGS, max_iter=3),
    "Muon": muon,
    "NAdam": OPTIM.NAdam,
    "RAdam": OPTIM.RAdam,
    "RMSprop": partial(OPTIM.RMSprop, momentum=0.5, centered=True),
    "Rprop": partial(OPTIM.Rprop, lr=1e-3),
    "SGD": OPTIM.SGD,
    "SGD with momentum": partial(OPTIM.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Lamb": Lamb,
    "Lars": Lars,
    "Sm3": Sm3,
}
# Bytes with which parameters must be split over dp, and that a rank can do with; more where state is kept whole of split parameters.
BUDGET, MORE = 76_000, {"Lamb": 112_000, "Lars": 96_000, "Muon": 96_000}
# More on processes, for what gloo copies for itself; not so much that plans split over tp alone fit.
GLOO_COPIES, NO_COPIES = 2_000, ("Adafactor",)
PLACES = {"dp2 tp2": ((2, 2), ("dp", "tp")), "pp2 dp2": ((2, 2), ("pp", "dp")), "budget": ((2, 2), ("dp", "tp"))}
STEPS = 4
# Muon multiplies in bfloat16: what is summed in another order differs by its rounding.
TOLERANCES = {"Muon": 2e-2}


def options_for(where: str, name: str, spare: int = 0) -> dict[str, Any]:
    """With statistics of whole parameters, and no others, known of those that nobody knows."""
    spare = 0 if name in NO_COPIES else spare
    known = {"train_step": autopar.TrainStep(update_scope="parameter")} if name in ("Lamb", "Lars", "Sm3") else {}
    return known | ({"cluster": "8xH100", "memory_budget": MORE.get(name, BUDGET) + spare} if where == "budget" else {})


def plain(name: str) -> nn.Module:
    """What a loop on one device leaves."""
    model = small_gpt()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(STEPS):
        values = batch(step)

        def closure(values: dict[str, Tensor] = values) -> float:
            optimizer.zero_grad()
            loss = model(**values)
            loss.backward()
            return float(loss)

        if name == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return model


def trained(name: str, where: str, mesh: Any, share: Callable[[dict[str, Tensor]], dict[str, Tensor]], spare: int = 0) -> float | str:
    """The largest difference of a parameter from those of one device; or what was refused."""
    try:
        parallel = autopar.compile(
            small_gpt(),
            mesh,
            example_inputs=share(batch(0)),
            backend="eager",
            optimizer=OPTIMIZERS[name],
            **options_for(where, name, spare),
        )
        for step in range(STEPS):
            parallel.train_step(**share(batch(step)))
    except AutoparError as error:
        return str(error)
    if where == "budget":
        inputs = parallel.compiled.local.signature.inputs_of("parameter")
        assert any("dp" in item.sharding.axes for item in inputs if item.sharding), f"{name}: the budget must split parameters over dp"
    full = parallel.full_state_dict()
    return max(float((full[key] - value).abs().max()) for key, value in plain(name).state_dict().items())


def assert_right(found: dict[str, float | str], refused: set[str]) -> None:
    wrong = {
        name: value
        for name, value in found.items()
        if name not in refused and not (isinstance(value, float) and value <= TOLERANCES.get(name, 1e-9))
    }
    assert not wrong, wrong
    assert all(isinstance(found[name], str) and name in str(found[name]) for name in refused & found.keys()), found


def test_every_optimizer_of_torch_is_tried() -> None:
    classes = {name for name in dir(OPTIM) if isinstance(getattr(OPTIM, name), type)} - {"Optimizer", "SparseAdam"}
    assert classes <= OPTIMIZERS.keys()


def test_sparse_gradients_are_refused_by_name() -> None:
    with pytest.raises(AutoparError, match="SparseAdam takes sparse gradients alone"):
        autopar.compile(small_gpt(), autopar.virtual_mesh(dp=2), optimizer=OPTIM.SparseAdam)


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_virtual_ranks_train_as_one_device(name: str, where: str) -> None:
    sizes, axes = PLACES[where]
    mesh = autopar.virtual_mesh(**dict(zip(axes, sizes, strict=True)))
    # How much state it will have, a budget cannot know.
    assert_right({name: trained(name, where, mesh, copy.copy)}, {"LBFGS"} if where == "budget" else set())


def trains_on_processes(where: str, names: list[str]) -> dict[str, float | str]:
    sizes, axes = PLACES[where]
    inner = 2 if axes[0] == "dp" else 1

    def share(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.chunk(2)[dist.get_rank() // inner % 2] for name, value in values.items()}

    return {name: trained(name, where, init_device_mesh("cpu", sizes, mesh_dim_names=axes), share, GLOO_COPIES) for name in names}


NAMES = list(OPTIMIZERS)


@pytest.mark.slow
@pytest.mark.parametrize("names", [NAMES[:7], NAMES[7:14], NAMES[14:]], ids=lambda names: names[0])
@pytest.mark.parametrize("where", PLACES)
def test_processes_train_as_one_device(gloo_ranks: Any, where: str, names: list[str]) -> None:
    for found in gloo_ranks.run(trains_on_processes, where, names, timeout=1200.0):
        assert_right(found, {"LBFGS"})
