"""The errors that users' programs catch: all that ours raise (docs/from_trl.md)."""

from mcore_rl.ground.errors import (
    AlarmError,
    CheckpointError,
    ConfigError,
    DataError,
    DeadEngineError,
    DeadWorkerError,
    DeviceError,
    McoreRLError,
    NonFiniteError,
    RolloutError,
    RunDirectoryError,
    SyncError,
    Violation,
    WeightMapError,
    WeightsIncompleteError,
    WorkerError,
)

__all__ = [
    "AlarmError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DeadEngineError",
    "DeadWorkerError",
    "DeviceError",
    "McoreRLError",
    "NonFiniteError",
    "RolloutError",
    "RunDirectoryError",
    "SyncError",
    "Violation",
    "WeightMapError",
    "WeightsIncompleteError",
    "WorkerError",
]
