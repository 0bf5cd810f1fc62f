"""Which names a pattern means, and what is near it. (Folding: test_inspect.py.)"""

from __future__ import annotations

import pytest

from autopar.ir.pattern import is_meant, matches_module, matches_name, near_names


@pytest.mark.parametrize(
    ("path", "pattern", "expected"),
    [
        ("h.0.mlp", "h.*.mlp", True),
        ("h.0", "h.*", True),
        ("h.0.mlp", "h.*", False),
        ("h.0.mlp", "*.mlp", True),
        ("encoder.h.0.mlp", "*.mlp", True),
        ("mlp", "*.mlp", False),
        ("h.10.q_proj", "h.[0-9]*.[qkv]_proj", True),
        ("h.0.mlp", "h.0", False),
    ],
)
def test_modules_match_part_by_part(path: str, pattern: str, expected: bool) -> None:
    assert matches_module(path, pattern) is expected


def test_names_match_across_dots() -> None:
    assert matches_name("h.0.mlp.weight", "h.*") and matches_name("w[0]", "w[0]") and not matches_name("h.0", "h.1")


def test_near_names_come_first() -> None:
    names = ["wte.weight", "wpe.weight", *(f"h.{i}.mlp.down.weight" for i in range(4))]
    assert near_names("h.3.mlp.dwn.weight", names).startswith("h.3.mlp.down.weight, ")
    assert near_names("zzz", names) == "wte.weight, wpe.weight, h.0.mlp.down.weight, h.1.mlp.down.weight, …"
    assert near_names("zzz", []) == "none"


def test_a_pattern_for_reading_means_a_module_and_what_is_in_it() -> None:
    assert is_meant("model.layers.1.mlp.up.weight", "model.layers.1") and not is_meant("model.layers.10.mlp", "model.layers.1")
    assert is_meant("model.layers.10.mlp.up.weight", "model.layers.*") and not is_meant("model.norm", "model.layers.*")
    assert is_meant("h.0.mlp.down_proj", "down") and is_meant("h.0.mlp.down_proj", "mlp") and not is_meant("h.0.attn", "mlp")
    assert is_meant("h.0.mlp.fc", "*.mlp") and is_meant("h.3.mlp.fc.weight", "h.?.mlp") and not is_meant("h.3.attn", "*.mlp")
