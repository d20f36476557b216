"""The errors that users' programs catch (docs/from_trl.md)."""

from mcore_rl.ground.errors import ConfigError, DataError, McoreRLError, Violation

__all__ = ["ConfigError", "DataError", "McoreRLError", "Violation"]
