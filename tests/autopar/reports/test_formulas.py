"""Formulas give the numbers of the summary, and those of other sizes as well."""

from __future__ import annotations

import torch

import autopar
from autopar.reports.formulas import Formulas
from tests.support.models.zoo import gpt2


def test_formulas_are_the_numbers_at_any_size() -> None:
    case = gpt2(2).to(torch.float32)

    def compiled(batch: dict[str, torch.Tensor]) -> tuple[Formulas, autopar.ParallelModule]:
        parallel = autopar.compile(case.model, autopar.virtual_mesh(tp=2), example_inputs=batch, backend="eager")
        return parallel.formulas(), parallel

    found, parallel = compiled(case.batch)
    _, small = compiled({name: value[:4, :8] for name, value in case.batch.items()})
    memory = parallel.summary()["memory"]
    assert found.value(found.saved_bytes) == memory["saved_activations"]
    assert found.value(found.parameter_bytes) == memory["parameters"]
    assert found.value(found.flops) == parallel.summary()["flops"]["original"]
    # Another batch is saved by another plan; the model's FLOPs are the same formula.
    assert found.value(found.flops, b=4, s=8, s2=8) == small.summary()["flops"]["original"]
    assert {"b", "s", "h", "v", "L", "tp", "a", "d", "f"} <= {str(symbol) for symbol in found.sizes}
    text = str(found)
    assert "L = 2  layers" in text and "a*b*d*s" in text and len(text.splitlines()) <= 20
