"""`parallel.memory()`: what a step will take, readable, within a capacity or not, and as a picture."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

import autopar
from autopar.errors import AutoparError
from tests.support.models.zoo import gpt2


@pytest.fixture(scope="module")
def parallel() -> autopar.ParallelModule:
    case = gpt2(2).to(torch.float32)
    mesh = autopar.virtual_mesh(pp=2, dp=2)
    return autopar.compile(
        case.model, mesh, example_inputs=case.batch, backend="eager", optimizer="adamw", cluster="a100", num_microbatches=2
    )


def test_says_whether_it_fits_and_what_is_large(parallel: autopar.ParallelModule) -> None:
    found = parallel.memory()
    assert found.fits and found.margin_bytes == found.capacity_bytes - found.peak_bytes
    assert [place.stages for place in found.places] == [(0,), (1,)]
    for place in found.places:
        assert sum(place.kinds.values()) == place.peak_bytes == max(step.during_bytes for step in place.curve)
        assert sum(item.bytes for item in place.items) == pytest.approx(place.peak_bytes, rel=0.02)
    text = str(found)
    assert len(text.splitlines()) <= 30
    assert "to spare" in text and "pp = 1" in text and "state of the optimizer: adamw" in text
    assert any(item.what.startswith("transformer.h.*") and item.kind == "parameters" for item in found.fullest.items)
    assert any(item.source.file.endswith("modeling_gpt2.py") for item in found.fullest.items), "the largest have their lines"


def test_state_and_update_of_an_optimizer_are_part_of_it(parallel: autopar.ParallelModule) -> None:
    compiled, held = parallel.compiled, parallel.memory()
    for place, schedule in zip(held.places, compiled.schedules, strict=True):
        trainable = [name for (kind, name) in schedule.fed if kind == "parameter"]
        size = sum(schedule.bytes_of(schedule.fed["parameter", name][0]) for name in trainable)
        assert place.kinds["optimizer"] == 2 * size + 4 * len(trainable)
        update, _ = place.curve[-2:]  # behind it the caller gets the results
        # In buckets each begins at a multiple of 64 bytes.
        assert update.kinds["temporaries"] > 0 and size <= update.kinds["gradients"] < size + 64 * len(trainable)


def test_the_picture_is_a_chart_for_each_place(parallel: autopar.ParallelModule, tmp_path: Path) -> None:
    parallel.memory().save(tmp_path / "memory.svg")
    root = ET.parse(tmp_path / "memory.svg").getroot()
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"pp = 0", "pp = 1", "parameters", "activations", "temporaries"} <= set(texts)
    areas = [each.attrib["points"] for each in root.iter("{http://www.w3.org/2000/svg}polygon")]
    assert len(areas) >= 10 and all(" " in each for each in areas)
    with pytest.raises(AutoparError, match=r"pictures are SVG; name a file that ends in \.svg"):
        parallel.memory().save(tmp_path / "memory.png")
