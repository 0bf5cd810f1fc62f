import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace

from autopar.errors import AutoparError
from autopar.ir.schedule import Fragment
from autopar.runtime.execute import fragments as fragments_module
from autopar.runtime.execute.fragments import CompiledFragments


def double_and_sum(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, (x + y).sum()


FRAGMENTS = {"f": Fragment("f", symbolic_trace(double_and_sum))}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backends_compute_the_same(backend: str) -> None:
    compiled = CompiledFragments(FRAGMENTS, backend)
    x, y = torch.arange(6.0).view(2, 3), torch.ones(2, 3)
    with torch.no_grad():
        doubled, total = compiled.run("f", [x, y])
    assert torch.equal(doubled, x * 2) and total.item() == 21


def test_a_complex_view_of_real_numbers_crosses_fragments() -> None:
    """torch makes no fake of one whose base has another last dim, as `view_as_complex` of reshaped pairs has."""
    compiled = CompiledFragments({"f": Fragment("f", symbolic_trace(lambda z: (z * z,)))}, "aot_eager")
    numbers = torch.view_as_complex(torch.randn(4, 8).view(4, 4, 2))
    with torch.no_grad():
        for given in (numbers, numbers[:, :1].expand(4, 4)):
            assert torch.equal(compiled.run("f", [given])[0], given * given)


def test_compiled_once_for_equal_inputs_and_again_with_a_log_line_for_others(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[list[torch.Tensor]] = []

    def backend(module: GraphModule, inputs: list[torch.Tensor]) -> Any:
        calls.append(inputs)
        return lambda *arguments: list(module(*arguments))

    compiled = CompiledFragments(FRAGMENTS, backend)
    with caplog.at_level(logging.WARNING, logger="autopar"):
        for _ in range(3):
            result = compiled.run("f", [torch.ones(2, 3), torch.ones(2, 3)])
        assert isinstance(result, tuple) and len(calls) == 1 and not caplog.records
        compiled.run("f", [torch.ones(3, 2).t(), torch.ones(2, 3)])
    assert compiled.num_compiled == len(calls) == 2
    assert (
        "fragment f compiled again" in caplog.text
        and "was float32[2, 3] with strides [3, 1] on cpu, is float32[2, 3] with strides [1, 2]" in caplog.text
    )
    assert calls[1][0].stride() == (1, 2)


def test_a_backend_may_rewrite_its_graph_without_harm() -> None:
    def backend(module: GraphModule, inputs: list[torch.Tensor]) -> Any:
        for node in list(module.graph.nodes):
            if node.op == "call_function" and node.name.startswith("mul"):
                node.args = (node.args[0], 100)
        module.recompile()
        return module

    CompiledFragments(FRAGMENTS, backend).run("f", [torch.ones(1), torch.ones(1)])
    assert CompiledFragments(FRAGMENTS, "eager").run("f", [torch.ones(1), torch.ones(1)])[0].item() == 2


def test_a_failing_backend_names_the_fragment() -> None:
    def backend(module: GraphModule, inputs: list[torch.Tensor]) -> Any:
        raise RuntimeError("no compiler here")

    with pytest.raises(RuntimeError, match="no compiler here") as caught:
        CompiledFragments(FRAGMENTS, backend).run("f", [torch.ones(1), torch.ones(1)])
    assert "while compiling fragment f" in caught.value.__notes__


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(Exception, match="no_such_backend"):
        CompiledFragments(FRAGMENTS, "no_such_backend")


def test_inductor_leaves_a_fragment_of_one_op_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def backend(module: GraphModule, inputs: object) -> object:
        compiled.append(str([node.target for node in module.graph.nodes if node.op == "call_function"]))
        return module

    monkeypatch.setattr(fragments_module, "backend_named", lambda name: backend)
    x = torch.randn(4, 4)
    one, two = Graph(), Graph()
    placeholder = one.placeholder("x")
    one.output((one.call_function(torch.ops.aten.t.default, (one.call_function(torch.ops.aten.relu.default, (placeholder,)),)),))
    placeholder = two.placeholder("x")
    two.output((two.call_function(torch.ops.aten.neg.default, (two.call_function(torch.ops.aten.relu.default, (placeholder,)),)),))
    modules = {name: Fragment(name, GraphModule(nn.Module(), graph)) for name, graph in (("one", one), ("two", two))}
    for name, expected in (("inductor", 1), ("aot_eager", 2)):
        compiled.clear()
        fragments = CompiledFragments(modules, name)
        torch.testing.assert_close(fragments.run("one", [x]), (x.relu().t(),))
        torch.testing.assert_close(fragments.run("two", [x]), (-x.relu(),))
        assert len(compiled) == expected


def test_a_backend_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(AutoparError, match="no torch.compile backend is called 'inducter': there are eager, aot_eager,.* inductor"):
        CompiledFragments(FRAGMENTS, "inducter")
