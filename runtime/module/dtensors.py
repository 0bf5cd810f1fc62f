"""What autopar does in torch's place where the DTensors that users hold would be wrong without a word."""

from __future__ import annotations

from autopar._torch import data_taken_over, draws_taken_over, gathers_taken_over, look_at_numbers, views_taken_over
from autopar.runtime.module.draws import draw
from autopar.runtime.module.gathers import gathered, is_cut_from_whole
from autopar.runtime.module.placement import part_of_data, refuse_number_of_part
from autopar.runtime.module.views import view_words


def take_over() -> None:
    """For all DTensors of this process, from now on."""
    look_at_numbers(refuse_number_of_part)
    data_taken_over(part_of_data)
    draws_taken_over(draw)
    gathers_taken_over(gathered, is_cut_from_whole)
    views_taken_over(view_words)
