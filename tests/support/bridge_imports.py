"""Imports Transformer Engine's Python, Megatron and both bridges, once, for the ranks of tests/support/bridges.py.

``tools/set_up.sh`` puts the folders beside the environment: what is in them is installed without what it declares.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from tests.support.transformer_engine_stub import FOLDER, import_transformer_engine, pretended_accelerator

BRIDGES = Path(sys.prefix) / "bridges"


def _import() -> None:
    warnings.simplefilter("ignore")
    import_transformer_engine(str(FOLDER))  # before Megatron, which looks for it when it is imported
    sys.path.append(str(BRIDGES))
    with pretended_accelerator():
        import tests.support.bridge_adapters  # noqa: F401


_import()
