from typing import Any

import numpy as np
import pytest
import torch

from autopar.driver.options import BatchOfFirst
from autopar.errors import InputError, MeshError
from autopar.ir.mesh import Mesh
from autopar.runtime.module.call_agreement import unequal_shares
from autopar.runtime.module.input_values import check_values
from autopar.runtime.module.inputs import CallInputs, batch_dims_of, check_inputs, check_replicas, global_call

FIRST = BatchOfFirst()
INPUTS = CallInputs.of(
    (torch.ones(3, 4),), {"extra": {"mask": torch.ones(2, 3), "flag": None}, "bias": torch.ones(7), "n": 5, "ids": torch.ones(3)}
)


def test_leaves_are_named_as_the_user_would() -> None:
    assert INPUTS.names == ("args[0]", "bias", "extra['mask']", "extra['flag']", "ids", "n")
    assert [(index, name) for index, name, _ in INPUTS.tensors] == [(0, "args[0]"), (1, "bias"), (2, "extra['mask']"), (4, "ids")]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (FIRST, {0: 0, 4: 0}),
        (0, {0: 0, 1: 0, 2: 0, 4: 0}),
        ({"args[0]": 1, "extra": -1}, {0: 1, 2: 1}),
        ({"ids": 0, "bias": None}, {4: 0}),
    ],
)
def test_batch_dims(given: Any, expected: dict[int, int]) -> None:
    assert batch_dims_of(INPUTS, given) == expected


@pytest.mark.parametrize("names", [("x", "edges"), ("a", "zebra")])
def test_the_first_input_is_the_first_of_forward_however_it_is_called(names: tuple[str, str]) -> None:
    """Two of 8 nodes and 12 edges, called by keywords in another order."""
    nodes, edges = torch.ones(8, 4), torch.ones(12)
    inputs = CallInputs.of((), {names[1]: edges, names[0]: {"values": nodes}, "more": torch.ones(8)})
    found = batch_dims_of(inputs, BatchOfFirst((*names, "more")))
    assert {inputs.names[index] for index in found} == {f"{names[0]}['values']", "more"}


def test_keywords_that_forward_does_not_name_follow() -> None:
    inputs = CallInputs.of((), {"a": torch.ones(12), "x": torch.ones(8), "y": torch.ones(8)})
    assert {inputs.names[index] for index in batch_dims_of(inputs, BatchOfFirst(("x", "kwargs")))} == {"x", "y"}
    assert {inputs.names[index] for index in batch_dims_of(inputs, BatchOfFirst(("args", "kwargs")))} == {"a"}


def test_batch_dims_of_an_unknown_input_are_refused() -> None:
    with pytest.raises(InputError, match=r"batch_dims names 'idz', which is no input of this call; its inputs are args\[0\], bias"):
        batch_dims_of(INPUTS, {"idz": 0})


def test_names_of_inputs_without_a_batch_dim_alone_are_refused() -> None:
    """They stand in place of the default, and nothing would be split."""
    with pytest.raises(InputError, match=r"batch_dims=\{'bias': None\} .* leaves out args\[0\], .* batch_dims=\{'args\[0\]': 0, …\}"):
        batch_dims_of(INPUTS, {"bias": None})
    assert batch_dims_of(INPUTS, dict.fromkeys(("args[0]", "bias", "extra", "ids"))) == {}
    assert batch_dims_of(INPUTS, {}) == {}


@pytest.mark.parametrize("dims", [1, {"x": 1}, -2, {"x": -2}])
def test_a_batch_dim_that_an_input_does_not_have_is_refused(dims: int | dict[str, int]) -> None:
    inputs = CallInputs.of((), {"x": torch.ones(8)})
    with pytest.raises(InputError, match=r"batch_dims says that dim -?\d of x counts samples, and its shape is \(8,\); give its batch dim"):
        batch_dims_of(inputs, dims)
    assert batch_dims_of(inputs, -1) == batch_dims_of(inputs, {"x": 0}) == {0: 0}


def test_keys_tell_calls_apart() -> None:
    def key(**kwargs: Any) -> Any:
        return CallInputs.of((), kwargs).key

    base = key(x=torch.ones(2), n=1)
    assert base == key(n=1, x=torch.zeros(2)) and hash(base) == hash(key(n=1, x=torch.zeros(2)))
    others = [
        key(x=torch.ones(3), n=1),
        key(x=torch.ones(2).double(), n=1),
        key(x=torch.ones(2), n=2),
        key(x=torch.ones(2), n=True),
        key(x=torch.ones(2)),
    ]
    assert base not in others


def test_a_share_grows_to_the_global_batch() -> None:
    args, kwargs = global_call(INPUTS, {0: 0, 2: 1}, {0: 12, 2: 10})
    assert args[0].shape == (12, 4) and kwargs["extra"]["mask"].shape == (2, 10) and kwargs["bias"].shape == (7,) and kwargs["n"] == 5


def test_replicas_are_compared_by_dtype_shape_and_bytes() -> None:
    mesh = Mesh((("dp", 2), ("tp", 1)))

    def compare(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        sums: list[Any] = []
        check_replicas(CallInputs.of((), {"x": theirs}), {}, mesh, lambda mine, what: sums.append(mine) or [mine, mine])
        check_replicas(CallInputs.of((), {"x": ours}), {}, mesh, lambda mine, what: [mine, sums[0]])

    compare(torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16))
    compare(torch.tensor(True), torch.tensor(True))
    for ours, theirs in ((torch.ones(2), torch.ones(2).double()), (torch.ones(2), torch.ones(1, 2)), (torch.zeros(1), torch.zeros(1) * -1)):
        with pytest.raises(InputError, match="'x' differs between ranks 0 and 1"):
            compare(ours, theirs)


@pytest.mark.parametrize("is_virtual", [False, True])
def test_inputs_on_another_device_are_refused_and_those_on_meta_planned_with(is_virtual: bool) -> None:
    inputs = CallInputs.of((torch.ones(4, 2),), {"y": torch.ones(4, device="meta")})
    with pytest.raises(InputError) as caught:
        check_inputs(inputs, {0: 0, 1: 0}, torch.device("cuda"), is_virtual=is_virtual)
    assert "'args[0]' is on cpu, the parameters are on cuda: pass args[0].to('cuda')" in str(caught.value)
    assert ("'y' is on meta" in str(caught.value)) is not is_virtual


def test_what_has_no_values_is_named() -> None:
    inputs = CallInputs.of((torch.ones(4, 2),), {"y": torch.ones(4, device="meta")})
    with pytest.raises(InputError, match="without values: 'y'; "):
        check_values(inputs, {"weight": torch.ones(2)}.items())
    with pytest.raises(MeshError, match="1 parameters and buffers are on meta or fake, the first is 'scale'"):
        check_values(inputs, {"weight": torch.ones(2), "scale": torch.ones(2, device="meta")}.items())


def shares_of(*sizes: int, dims: Any = FIRST, width: int = 4) -> Any:
    """Of two places along dp, two ranks each: x [n, 4], y [n] and a table [3, 4]."""
    every = [{"x": ((size, 4), "f"), "y": ((size,), "f"), "z": ((3, width if rank else 4), "f")} for rank, size in enumerate(sizes)]
    inputs = CallInputs.of((), {"x": torch.ones(sizes[0], 4), "y": torch.ones(sizes[0]), "z": torch.ones(3, 4)})
    return unequal_shares(inputs, every, Mesh((("dp", 2), ("tp", 2))), dims).inputs


def test_unequal_shares_are_told_by_place_along_dp() -> None:
    assert shares_of(3, 3, 1, 1) == ((0, 0, (3, 1)), (1, 0, (3, 1)))  # z has a dim of 3, too, on ranks 2 and 3 alone no batch
    assert shares_of(0, 0, 2, 2, dims={"x": 0, "y": 0}) == ((0, 0, (0, 2)), (1, 0, (0, 2)))
    with pytest.raises(InputError, match="ranks 0 and 1 pass 'x' of different shapes.* ranks at one place along dp pass the same"):
        shares_of(3, 2, 2, 2)
    with pytest.raises(InputError, match="ranks 0 and 1 pass 'z' of different shapes.* it has no batch"):
        shares_of(3, 3, 2, 2, width=5)
    with pytest.raises(InputError, match="'x' has no samples on any rank"):
        shares_of(0, 0, 0, 0)


@pytest.mark.parametrize(("given", "plain"), [(np.float64(0.5), 0.5), (np.float32(0.5), 0.5), (np.int64(2), 2), (np.bool_(True), True)])
def test_numbers_of_numpy_are_pythons(given: Any, plain: object) -> None:
    inputs = CallInputs.of((torch.ones(2),), {"t": {"scale": given}})
    (_, kwargs), expected = inputs.call(), CallInputs.of((torch.ones(2),), {"t": {"scale": plain}})
    assert kwargs == {"t": {"scale": plain}} and type(kwargs["t"]["scale"]) is type(plain)
    assert inputs.key == expected.key


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_inputs_are_refused(layout: torch.layout) -> None:
    inputs = CallInputs.of((), {"edges": torch.eye(4).to_sparse(layout=layout)})
    with pytest.raises(InputError, match=rf"'edges' is of layout {layout}.*pass edges\.to_dense\(\).*index_add"):
        check_inputs(inputs, {}, torch.device("cpu"), is_virtual=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_inputs_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=torch.jagged)
    with pytest.raises(InputError, match=r"'x' is of layout torch\.jagged.*pass x\.to_padded_tensor\(0\.0\)"):
        check_inputs(CallInputs.of((), {"x": nested}), {}, torch.device("cpu"), is_virtual=True)
