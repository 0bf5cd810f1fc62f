"""On which hardware a report says seconds. A plan for an ideal cluster, whose links are free, has no seconds of its own: they are said
on this machine, as `autopar.calibrate` measured it, or on a CPU as the file `cpu.yaml` describes one. The decisions stay what they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.hardware.kept import kept
from autopar.cost.model import CostModel
from autopar.driver.compiled import Compiled
from autopar.reports.summary import cost_of

_BY_FILE = "one CPU core a rank, by cpu.yaml (not measured here: autopar.calibrate() does)"
_IDEAL = Cluster.ideal().device.name


@dataclass(frozen=True)
class Hardware:
    """`cost` prices on it, `words` say what it is; `is_ideal` where the plan was made for another, the ideal one."""

    cost: CostModel
    words: str
    is_ideal: bool


def hardware_of(compiled: Compiled) -> Hardware:
    """What seconds of this program are said on."""
    planned = cost_of(compiled)
    if planned.cluster.device.name != _IDEAL:
        return Hardware(planned, _words(planned.cluster), False)
    measured = kept("cpu")
    words = "this machine, as autopar.calibrate() measured it" if measured else _BY_FILE
    cost = CostModel(measured or Cluster.named("cpu"), planned.mesh, planned.optimizer)
    return Hardware(cost, words, True)


def _words(cluster: Cluster) -> str:
    if cluster.name == "cpu":
        return _BY_FILE
    return f"{cluster.name}, as measured by autopar.calibrate()" if cluster.name == "calibrated" else cluster.name
