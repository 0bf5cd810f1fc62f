"""What lies elsewhere than on the device between its uses, and what copies take.

pp = 0, parameters: 28 parameters, 1.2 MB, in host memory, copied to the device 1.9 times a step; at most 13.1 MB → 12.1 MB a rank
pp = 0, activations: 22 memories, 3.4 MB, to host memory and back; at most 12.1 MB → 8.9 MB a rank
optimizer: at most 6.3 MB of state a rank in host memory
copies take 1.2 ms of a step on paper, and a rank waits 0.1 ms for them
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cost.model import CostModel
from autopar.driver.compiled import Compiled
from autopar.ir.instructions import Copy
from autopar.ir.units import in_bytes, in_seconds
from autopar.pipeline.exposure import predicted_exposure
from autopar.pipeline.fragment_prices import fragment_seconds, on_paper
from autopar.pipeline.stays import Trips
from autopar.pipeline.visits import Visits


def offload_lines(compiled: Compiled, cost: CostModel) -> Iterator[str]:
    """Nothing where nobody asked. Seconds are those of the place whose copies take longest."""
    if compiled.weighed:
        yield compiled.weighed
    if compiled.offload is None:
        return
    for step in compiled.schedule_steps:
        if not isinstance(step.decision, (Trips, Visits)):
            continue
        reasons, what = step.decision.reasons, "activations" if isinstance(step.decision, Trips) else "parameters"
        for place, reason in enumerate(reasons):
            yield f"{f'pp = {place}, ' if len(reasons) > 1 else ''}{what}: {reason}"
    optimizer = compiled.budget.optimizer
    if optimizer.away is not None:
        named = [zip(each.signature.inputs, map(each.bytes_of, each.inputs), strict=True) for each in compiled.schedules]
        most_state = max(sum(optimizer.away_bytes(item, size) for item, size in each) for each in named)
        yield f"optimizer: at most {in_bytes(most_state)} of state a rank in {'host memory' if optimizer.away == 'host' else 'files'}"
    copies = [[each for each in schedule.instructions if isinstance(each, Copy)] for schedule in compiled.schedules]
    if any(copies):
        seconds = fragment_seconds(compiled.schedule, cost)
        waits = predicted_exposure(compiled.schedule, on_paper(compiled.schedule, cost, has_memory=False)).copy_seconds
        most = max(sum(map(seconds, each)) for each in copies)
        yield f"copies take {in_seconds(most)} of a step on paper, and a rank waits {in_seconds(waits)} for them"
