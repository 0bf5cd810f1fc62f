"""Parameters side by side are stepped in pieces: numbers, and what the optimizer's owner sees, are as if each were stepped by itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime._torch import version_of
from autopar.runtime.execute.buckets import Layout
from autopar.runtime.train import runs
from autopar.runtime.train.runs import Member, Run, State, runs_of

SHAPES = ((7, 3), (5,), (40, 9), (1,), (16,), (3, 2, 4))
KINDS: list[Callable[[Any], torch.optim.Optimizer]] = [
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    partial(torch.optim.Adam, amsgrad=True),
    torch.optim.Adamax,
    torch.optim.AdamW,
    partial(torch.optim.AdamW, foreach=True),
    torch.optim.ASGD,
    partial(torch.optim.NAdam, foreach=True),
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "PIECE_BYTES", 64 * 8)


class Loop:
    """Parameters, each with what stands in for it, and the state that an optimizer has of these."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], shapes: Sequence[tuple[int, ...]] = SHAPES, groups: int = 1) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parts = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        self.locals = [part.detach() for part in self.parts]
        # A class may say something of each parameter when it is made.
        self.optimizer = make([{"params": self.locals[number::groups]} for number in range(groups)])
        self.states: dict[Tensor, dict[str, Any]] = {each: self.optimizer.state.get(each, {}) for each in self.locals}
        self.laid: set[int] = set()

    def give(self, gradients: Sequence[Tensor | None]) -> None:
        for local, gradient in zip(self.locals, gradients, strict=True):
            local.grad = gradient

    def in_runs(self) -> list[Run]:
        """A step, after which all state is in `states`."""
        inner: State = defaultdict(dict, {each: state for each, state in self.states.items() if state and each.grad is not None})
        groups = [[id(each) for each in group["params"]] for group in self.optimizer.param_groups]
        members = [
            Member(
                number,
                local,
                part,
                next(place for place, ids in enumerate(groups) if id(local) in ids),
                self.states[local],
                number in self.laid,
            )
            for number, (local, part) in enumerate(zip(self.locals, self.parts, strict=True))
            if local.grad is not None
        ]
        found = [Run(each, inner) for each in runs_of(members)]
        joined = {member.number: run for run in found for member in run.members}
        self.laid |= joined.keys()
        stepped: list[list[Tensor]] = [[] for _ in groups]
        for member in members:
            if member.number not in joined:
                stepped[member.group].append(member.local)
        for run in found:
            stepped[run.members[0].group] += run.pieces
        own, state = [group["params"] for group in self.optimizer.param_groups], self.optimizer.state
        for group, tensors in zip(self.optimizer.param_groups, stepped, strict=True):
            group["params"] = tensors
        self.optimizer.state = inner
        self.optimizer.step()
        for group, tensors in zip(self.optimizer.param_groups, own, strict=True):
            group["params"] = tensors
        self.optimizer.state = state
        for run in found:
            run.dissolve(inner)
        self.states.update({each: inner[each] for each in self.locals if each in inner})
        return found

    def plainly(self) -> None:
        self.optimizer.step()


def gradients(step: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    """Of a bucket, as they come out of a backward."""
    layout = Layout.of(tuple(shapes), torch.float64)
    views = layout.unpacked(layout.memory(torch.empty(0, dtype=torch.float64), 1))
    generator = torch.Generator().manual_seed(step)
    return [view.copy_(torch.randn(view.shape, generator=generator, dtype=torch.float64)) for view in views]


def check_equal(mine: Loop, theirs: Loop) -> None:
    for one, part, other in zip(mine.locals, mine.parts, theirs.locals, strict=True):
        assert torch.equal(one, other) and torch.equal(part, other)
        expected = theirs.optimizer.state.get(other, {})
        assert mine.states[one].keys() == expected.keys()
        for key, value in expected.items():
            have = mine.states[one][key]
            assert torch.equal(have, value) and have.shape == value.shape if isinstance(value, Tensor) else have == value, key


@pytest.mark.parametrize("make", KINDS)
def test_numbers_and_state_are_those_of_each_by_itself(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    mine, theirs = Loop(make), Loop(make)
    for step in range(4):
        found = gradients(step)
        mine.give(found)
        theirs.give([each.clone() for each in found])
        before, has_state = list(map(version_of, mine.parts)), bool(mine.states[mine.locals[0]])
        (run,) = mine.in_runs()
        assert all(each.grad is None for each in (*mine.locals, *run.pieces)), "whose memory is free"
        assert all(now > then for now, then in zip(map(version_of, mine.parts), before, strict=True)), "autograd knows that all are written"
        assert len(run.members) == len(SHAPES)
        assert len(run.pieces) == (7 if has_state else 1), "440 elements with what lies between, 64 in each"
        theirs.plainly()
        check_equal(mine, theirs)
    begins = [each.data_ptr() - mine.parts[0].data_ptr() for each in mine.parts]
    assert begins == [8 * offset for offset in Layout.of(SHAPES, torch.float64).offsets], "they lie in one memory"
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in mine.parts), "and have storages of their own"


def lengths(found: Sequence[Run]) -> list[int]:
    return [len(run.members) for run in found]


def test_what_skips_a_step_has_its_own_count_from_then_on() -> None:
    """And nothing of it is touched while its neighbours step: it lies between them."""
    mine, theirs = Loop(torch.optim.AdamW), Loop(torch.optim.AdamW)
    found: list[list[int]] = []
    for step in range(4):
        given: list[Tensor | None] = [*gradients(step)]
        if step == 1:
            given[3] = None
        mine.give(given)
        theirs.give([None if each is None else each.clone() for each in given])
        found.append(lengths(mine.in_runs()))
        theirs.plainly()
        check_equal(mine, theirs)
    assert found == [[6], [3, 2], [3, 2], [3, 2]]


def test_groups_of_options_are_not_mixed() -> None:
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    mine, theirs = Loop(make, groups=2), Loop(make, groups=2)
    for loop in (mine, theirs):
        loop.optimizer.param_groups[1]["lr"] = 0.01
    for step in range(2):
        found = gradients(step)
        mine.give(found)
        theirs.give([each.clone() for each in found])
        assert lengths(mine.in_runs()) == [1] * step, "the large one, which is cut once it has state"
        theirs.plainly()
        check_equal(mine, theirs)


def test_gradients_in_another_order_move_nothing_again() -> None:
    """Two programs take turns: each has its own buckets."""
    mine, theirs = Loop(torch.optim.AdamW), Loop(torch.optim.AdamW)
    found: list[list[int]] = []
    for step in range(4):
        given = gradients(step)
        if step % 2:
            given = list(reversed(gradients(step, tuple(reversed(SHAPES)))))
        mine.give(given)
        theirs.give([each.clone() for each in given])
        addresses = [each.data_ptr() for each in mine.parts]
        found.append(lengths(mine.in_runs()))
        assert step == 0 or addresses == [each.data_ptr() for each in mine.parts]
        theirs.plainly()
        check_equal(mine, theirs)
    assert found == [[6], [1], [6], [1]], "the large one is cut wherever it lies"


def test_what_somebody_else_looks_at_stays_where_it_is() -> None:
    mine = Loop(torch.optim.SGD)
    seen = mine.parts[2].view(-1)
    mine.give(gradients(0))
    before = seen.clone()
    assert lengths(mine.in_runs()) == [2, 3]
    assert not torch.equal(seen, before) and torch.equal(seen, mine.parts[2].view(-1))


def test_gradients_of_no_bucket_are_stepped_one_by_one() -> None:
    mine = Loop(torch.optim.SGD)
    mine.give([torch.ones(shape, dtype=torch.float64) for shape in SHAPES])
    assert lengths(mine.in_runs()) == []
    dense = torch.ones(475, dtype=torch.float64)  # and those that begin anywhere: what lies between is another's
    sizes = [each.numel() for each in mine.locals]
    mine.give([each.view(shape) for each, shape in zip(dense.split([*sizes, 475 - sum(sizes)])[:-1], SHAPES, strict=True)])
    assert lengths(mine.in_runs()) == []


def test_a_large_one_is_cut() -> None:
    shapes = ((30, 10), (4,))
    mine, theirs = Loop(torch.optim.AdamW, shapes), Loop(torch.optim.AdamW, shapes)
    for step in range(3):
        found = [torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(step)) for shape in shapes]
        mine.give(found)
        theirs.give([each.clone() for each in found])
        # With its state: made in pieces it would have to be put together.
        assert [piece.numel() for run in mine.in_runs() for piece in run.pieces] == ([64, 64, 64, 64, 44] if step else [])
        theirs.plainly()
        check_equal(mine, theirs)


def test_a_run_is_entered_again_with_gradients_anywhere_and_not_once_a_count_was_written() -> None:
    mine = Loop(torch.optim.AdamW)
    for step in range(2):
        mine.give(gradients(step))
        mine.in_runs()
    inner: State = defaultdict(dict, mine.states)
    mine.give(gradients(2))
    members = [
        Member(number, local, part, 0, mine.states[local], True)
        for number, (local, part) in enumerate(zip(mine.locals, mine.parts, strict=True))
    ]
    run = Run(members, inner)
    elsewhere = gradients(3)
    assert run.put(elsewhere)
    given = run.pieces[0].grad
    assert given is not None and torch.equal(given[:21], elsewhere[0].flatten())
    assert not run.put([each.clone() for each in elsewhere]), "they do not lie side by side"
    turned = [elsewhere[0].t().contiguous().t(), *elsewhere[1:]]
    assert not run.put(turned)
    run.end_step()
    assert run.is_as_it_was() and all(piece.grad is None for piece in run.pieces)
    count = mine.states[mine.locals[4]]["step"]
    count.data.fill_(0)
    assert not run.is_as_it_was()
    count.fill_(2)
    assert run.is_as_it_was()
    count.data = torch.tensor(2.0)
    assert not run.is_as_it_was()
