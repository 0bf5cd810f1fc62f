"""autopar: compiler passes that take an unmodified PyTorch model to a program for every rank of a mesh."""

from autopar.compiler import compile
from autopar.cost.hardware.calibrate import calibrate
from autopar.cost.hardware.cluster import Cluster
from autopar.driver.train_step import LossScale, TrainStep
from autopar.errors import (
    ArgumentError,
    AutoparError,
    BackwardError,
    CaptureError,
    CheckError,
    InputError,
    MeshError,
    MicrobatchError,
    ModelError,
    NonFiniteError,
    PeerError,
    PlanError,
    ScheduleError,
    UnmatchedPinError,
    ValueCheckError,
)
from autopar.ir.mesh import Mesh, virtual_mesh
from autopar.ir.precision import MixedPrecision
from autopar.ir.zero import ZeRO
from autopar.plans.plan import Plan
from autopar.runtime.module.parallel_module import ParallelModule

__all__ = [
    "ArgumentError",
    "AutoparError",
    "BackwardError",
    "CaptureError",
    "CheckError",
    "Cluster",
    "InputError",
    "LossScale",
    "Mesh",
    "MeshError",
    "MicrobatchError",
    "MixedPrecision",
    "ModelError",
    "NonFiniteError",
    "ParallelModule",
    "PeerError",
    "Plan",
    "PlanError",
    "ScheduleError",
    "TrainStep",
    "UnmatchedPinError",
    "ValueCheckError",
    "ZeRO",
    "calibrate",
    "compile",
    "virtual_mesh",
]
