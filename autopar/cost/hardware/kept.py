"""The calibration of this machine: `autopar.calibrate` keeps what it measured, and reports say seconds by it. Compiling never measures.

It is a file for each kind of device, in the folder that the environment variable AUTOPAR_CACHE names, else in ~/.cache/autopar.
"""

from __future__ import annotations

import logging
import os
import platform
from pathlib import Path

from autopar.cost.hardware.cluster import Cluster, ClusterError

logger = logging.getLogger("autopar")
FOLDER = "AUTOPAR_CACHE"


def kept_path(device: str) -> Path:
    """Where the calibration of this machine's devices of a type ("cpu", "cuda") is."""
    folder = os.environ.get(FOLDER) or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopar"
    return Path(folder) / f"{platform.node() or 'here'}-{device}.yaml"


def keep(cluster: Cluster, device: str) -> None:
    """Keep what was measured. Where nothing can be written it is not kept, and the log says so."""
    path = kept_path(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        cluster.to_yaml(path)
    except OSError as error:
        logger.info("the calibration is not kept: %s", error)


def kept(device: str) -> Cluster | None:
    """What was measured on this machine, if anything was."""
    path = kept_path(device)
    if not path.is_file():
        return None
    try:
        return Cluster.from_yaml(path)
    except ClusterError as error:
        logger.warning("the calibration kept in %s is not read: %s", path, error)
        return None
