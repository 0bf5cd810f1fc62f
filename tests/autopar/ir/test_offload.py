"""What `offload=` may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopar.errors import AutoparError
from autopar.ir.offload import Offload


def test_a_word_or_a_value(tmp_path: Path) -> None:
    assert Offload.of(None) is None
    assert Offload.of("activations") == Offload(activations="host")
    assert Offload.of("parameters") == Offload(parameters="host")
    asked = Offload(activations="file", folder=str(tmp_path))
    assert Offload.of(asked) is asked and asked.uses_files and not Offload("host").uses_files


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Offload.of("weights"), r"offload='weights' is unknown; use \"auto\", \"activations\", \"optimizer\""),
        (lambda: Offload(activations="disk"), r"Offload\(activations='disk'\) is no place"),  # pyright: ignore[reportArgumentType]
        (lambda: Offload(optimizer="disk"), r"Offload\(optimizer='disk'\) is no place; use"),  # pyright: ignore[reportArgumentType]
        (lambda: Offload(parameters="disk"), r"Offload\(parameters='disk'\) is no place; use"),  # pyright: ignore[reportArgumentType]
        (lambda: Offload(activations="file"), "needs to know where"),
        (lambda: Offload(parameters="file"), "needs to know where"),
        (lambda: Offload(optimizer="file"), "needs to know where"),
        (lambda: Offload(activations="file", folder="/no/such/folder"), "there is no such folder"),
        (lambda: Offload(smallest_bytes=-1), "use 0 to move everything"),
    ],
)
def test_refusals(make: Any, text: str) -> None:
    with pytest.raises(AutoparError, match=text):
        make()


def test_state_lies_with_what_it_updates(tmp_path: Path) -> None:
    assert Offload(parameters="host").state == "host" and Offload(optimizer="host").state == "host" and Offload().state is None
    assert Offload(parameters="file", optimizer="host", folder=str(tmp_path)).state == "host"
    assert Offload(parameters="host", optimizer="host").updated == "parameters" and Offload(optimizer="host").updated == "optimizer"
