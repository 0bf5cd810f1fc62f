import pytest
import torch

from autopar.errors import ScheduleError
from autopar.ir.instructions import Receive, Send
from autopar.ir.schedule import TensorType
from autopar.runtime.execute.rendezvous import PointToPoint

F32 = torch.float32
SENT = Send("0F2>1", "pp", 1, ("h", "mask"))
TENSORS = (torch.ones(2, 3), torch.ones(2, dtype=torch.bool))
LAYOUTS: list[TensorType] = [((2, 3), F32), ((2,), torch.bool)]


@pytest.mark.parametrize("sends_first", [True, False])
def test_the_receiver_gets_the_very_tensors_once_both_ends_are_launched(sends_first: bool) -> None:
    crossing, received = PointToPoint((0, 3), 0), Receive("0F2>1", "pp", 0, ("a", "b"))
    steps = [lambda: crossing.send(SENT, TENSORS), lambda: crossing.receive(received, LAYOUTS)]
    assert crossing.missing == (0, 3)
    steps[not sends_first]()
    assert crossing.missing == ((3,) if sends_first else (0,))
    steps[sends_first]()
    assert crossing.missing == () and crossing.arrived(0) == ()
    assert [one is other for one, other in zip(crossing.arrived(3), TENSORS, strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("received", "layouts", "expected"),
    [
        (Receive("0F3>1", "pp", 0, ("h", "mask")), LAYOUTS, "name 0F2>1 on rank 0 and 0F3>1 on rank 3"),
        (Receive("0F2>1", "pp", 0, ("h",)), LAYOUTS[:1], "number of buffers 2 on rank 0 and 1 on rank 3"),
        (
            Receive("0F2>1", "pp", 0, ("h", "mask")),
            [((3, 2), F32), LAYOUTS[1]],
            "shape of h (2, 3) on rank 0 and (3, 2) on rank 3",
        ),
        (
            Receive("0F2>1", "pp", 0, ("h", "m")),
            [LAYOUTS[0], ((2,), F32)],
            "dtype of mask → m torch.bool on rank 0 and torch.float32 on rank 3",
        ),
    ],
)
def test_ends_that_differ_name_ranks_instructions_and_both_values(received: Receive, layouts: list[TensorType], expected: str) -> None:
    for sends_first in (True, False):
        crossing = PointToPoint((0, 3), 4)
        steps = [lambda at=crossing: at.send(SENT, TENSORS), lambda at=crossing: at.receive(received, layouts)]
        steps[not sends_first]()
        with pytest.raises(ScheduleError) as caught:
            steps[sends_first]()
        text = str(caught.value)
        assert "transfer 5 from rank 0 to rank 3 differs at its ends" in text and expected in text
        assert f"rank 0: {SENT}" in text and f"rank 3: {received}" in text
