"""autopar: compiler passes that take an unmodified PyTorch model to a program for every rank of a mesh."""

from autopar.cost.hardware.cluster import Cluster
from autopar.doors.calibrate import calibrate
from autopar.doors.compile import compile, estimate_memory
from autopar.doors.measure_work import measure_work
from autopar.doors.predict import predict
from autopar.doors.rank_plans import rank_plans
from autopar.driver.pad_to import PadTo
from autopar.driver.train_step import LossScale, TrainStep
from autopar.errors import (
    ArgumentError,
    AutoparError,
    BackwardError,
    CaptureError,
    CheckError,
    CheckpointError,
    InputError,
    MeshError,
    MicrobatchError,
    ModelError,
    NonFiniteError,
    OffloadError,
    PeerError,
    PlanError,
    ScheduleError,
    UnmatchedPinError,
    ValueCheckError,
    WeightsError,
)
from autopar.foresight.constants import SoftwareProfile
from autopar.foresight.prediction import Prediction
from autopar.foresight.ranking import RankedPlan, RankedPlans
from autopar.ir.mesh import Mesh, virtual_mesh
from autopar.ir.offload import Offload
from autopar.ir.precision import MixedPrecision
from autopar.ir.zero import ZeRO
from autopar.plans.plan import Plan
from autopar.reports.flight_recorder import FlightRecord, read_recorder
from autopar.reports.memory import Memory
from autopar.runtime.birth.weights import Weights
from autopar.runtime.checkpoint.dcp import import_dcp
from autopar.runtime.checkpoint.exchange import export_safetensors, import_safetensors
from autopar.runtime.checkpoint.load import load
from autopar.runtime.checkpoint.save import save
from autopar.runtime.module.parallel_module import ParallelModule

__all__ = [
    "ArgumentError",
    "AutoparError",
    "BackwardError",
    "CaptureError",
    "CheckError",
    "CheckpointError",
    "Cluster",
    "FlightRecord",
    "InputError",
    "LossScale",
    "Memory",
    "Mesh",
    "MeshError",
    "MicrobatchError",
    "MixedPrecision",
    "ModelError",
    "NonFiniteError",
    "Offload",
    "OffloadError",
    "PadTo",
    "ParallelModule",
    "PeerError",
    "Plan",
    "PlanError",
    "Prediction",
    "RankedPlan",
    "RankedPlans",
    "ScheduleError",
    "SoftwareProfile",
    "TrainStep",
    "UnmatchedPinError",
    "ValueCheckError",
    "Weights",
    "WeightsError",
    "ZeRO",
    "calibrate",
    "compile",
    "estimate_memory",
    "export_safetensors",
    "import_dcp",
    "import_safetensors",
    "load",
    "measure_work",
    "save",
    "read_recorder",
    "predict",
    "rank_plans",
    "virtual_mesh",
]
