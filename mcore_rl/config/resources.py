"""Where the files lie that are no Python: recipes, clusters, model configurations, the Slurm script, the pages.

They are data of the package, in ``mcore_rl/resources``.  In a checkout of the repository those are links to the
folders that people read and edit (``launch/``, ``model_configs/``, ``docs/``), and the paths here name these; a wheel
has copies.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

RESOURCES = Path(str(files("mcore_rl"))) / "resources"
RECIPES = (RESOURCES / "recipes").resolve()
CLUSTERS = (RESOURCES / "clusters").resolve()
MODEL_CONFIGS = (RESOURCES / "model_configs").resolve()
SBATCH = (RESOURCES / "slurm" / "train.sbatch").resolve()
PAGES = (RESOURCES / "docs").resolve()
