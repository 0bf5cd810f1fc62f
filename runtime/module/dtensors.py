"""What autopar does in torch's place where the DTensors that users hold would be wrong without a word."""

from __future__ import annotations

from autopar.runtime.module._torch import (
    collectives_taken_over,
    data_taken_over,
    draws_taken_over,
    gathers_taken_over,
    numbers_taken_over,
    operations_taken_over,
    views_taken_over,
)
from autopar.runtime.module.draws import draw
from autopar.runtime.module.gathers import gathered, is_cut_from_whole
from autopar.runtime.module.numbers import number_of
from autopar.runtime.module.operations import NAMES, computed, refuse_collective
from autopar.runtime.module.placement import part_of_data
from autopar.runtime.module.views import view_words


def take_over() -> None:
    """For all DTensors of this process, from now on."""
    numbers_taken_over(number_of)
    data_taken_over(part_of_data)
    draws_taken_over(draw)
    gathers_taken_over(gathered, is_cut_from_whole)
    views_taken_over(view_words)
    operations_taken_over(NAMES, computed)
    collectives_taken_over(refuse_collective)
