"""The model and the number of steps of a recipe at full size, from tables of checkpoints and data.

Nothing is downloaded but the config.json of a Hub id.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcore_rl.config.hub_files import config_folder, fetched_config
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.resources import MODEL_CONFIGS
from mcore_rl.config.run import RunConfig
from mcore_rl.families.checkpoints import find_checkpoint, published_config
from mcore_rl.families.config_changes import ConfigChanges
from mcore_rl.families.config_json import CONFIG, read_config
from mcore_rl.families.registry import model_of
from mcore_rl.families.same_architecture import architecture_violations
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any

# By the folder that docs/baselines.md tells mcore-rl prepare to write; of DAPO, each question once.
GSM8K = 7473
DAPO = 17398
TRAIN_PROMPTS = {
    "gsm8k": GSM8K,
    "gsm8k-xml": GSM8K,
    "gsm8k-tools": GSM8K,
    "gsm8k-interaction": GSM8K,
    "math": 7500,
    "dapo": DAPO,
    "dapo-interpreter": DAPO,
    "geo3k": 2101,
}


def run_config_json(run: RunConfig | OfflineConfig) -> dict[str, Any]:
    """The ``config.json`` of a run's model, with the run's changes: its own if it is there, else its recipe's.

    The recipe's is the published one of ``model_configs/``.  Raises ConfigError if neither is known, or a change is
    read by nobody.
    """
    directory = config_folder(run.model.path)
    changes = ConfigChanges.of(run.model)
    if run.model.path and (directory / CONFIG).is_file():
        return changes.apply(read_config(directory))
    if run.recipe.checkpoint:
        return recipe_config_json(run)
    fetched_config(run)  # which says why, of a Hub id
    problem = "has no config.json, and recipe.checkpoint names no checkpoint of model_configs/"
    remedy = "Write model.path=DIR, a Hugging Face checkpoint, or recipe.checkpoint=NAME"
    raise ConfigError([Violation("model.path", run.model.path, problem, remedy)])


def recipe_config_json(run: RunConfig | OfflineConfig) -> dict[str, Any]:
    """The published ``config.json`` of the recipe's checkpoint, with the run's changes.

    Raises ConfigError if the recipe names no checkpoint, or an unknown one, or a change is read by nobody.
    """
    if not run.recipe.checkpoint:
        remedy = "Write recipe.checkpoint=NAME, a checkpoint of model_configs/"
        raise ConfigError([Violation("recipe.checkpoint", "", "is not set", remedy)])
    published = published_config(find_checkpoint(run.recipe.checkpoint, MODEL_CONFIGS), MODEL_CONFIGS)
    return ConfigChanges.of(run.model).apply(published)


def recipe_model(run: RunConfig | OfflineConfig) -> ModelConfig:
    """The model of a run by its recipe.  Raises ConfigError as ``recipe_config_json``, and if it is not supported."""
    return model_of(recipe_config_json(run), pictures=run.sees_pictures)[1]


def run_model(run: RunConfig | OfflineConfig) -> ModelConfig:
    """The model of a run.  Raises ConfigError as ``run_config_json``, and if it is not supported."""
    return model_of(run_config_json(run), pictures=run.sees_pictures)[1]


def other_models(run: RunConfig | OfflineConfig) -> dict[str, ModelConfig]:
    """The models of the roles that begin with another checkpoint than the policy, by role.

    That of its directory, or of ``recipe.checkpoints``.  Raises ConfigError if neither is known.
    """
    models = {}
    violations = list[Violation]()
    for role in run.group_rows:
        path = run.weights_of(role)
        checkpoints = run.checkpoints_of(role)
        here = {key: each for key, each in checkpoints.items() if (config_folder(each) / CONFIG).is_file()}
        violations += architecture_violations(here, config_folder) if len(here) > 1 else []
        if role.publishes or path == run.model_directory:
            continue
        if (config_folder(path) / CONFIG).is_file():
            models[role.name] = model_of(read_config(config_folder(path)), pictures=run.sees_pictures)[1]
        elif name := run.recipe.checkpoints.get(role.name):
            published = published_config(find_checkpoint(str(name), MODEL_CONFIGS), MODEL_CONFIGS)
            models[role.name] = model_of(published, pictures=run.sees_pictures)[1]
        else:
            problem = "has no config.json, and recipe.checkpoints names no checkpoint of model_configs/"
            key = next(iter(checkpoints))
            remedy = f"Write {key}=DIR, a Hugging Face checkpoint, or recipe.checkpoints.{role.name}=NAME"
            violations.append(Violation(key, path, problem, remedy))
    refuse_if_any(violations)
    return models


def num_steps(run: RunConfig | OfflineConfig) -> int:
    """The number of steps of a run: as configured, or from its epochs over the prompts of its known data sets.

    Raises ConfigError if no number is configured and the number of prompts is not known.
    """
    if run.trainer.total_training_steps is not None:
        return run.trainer.total_training_steps
    used = {Path(path).parent.name for path in run.data.train_files}
    unknown = sorted(used - TRAIN_PROMPTS.keys())
    if unknown or not used:
        problem = f"how many prompts {', '.join(unknown) or 'there are'} is not known"
        remedy = f"Write trainer.total_training_steps, or files of {', '.join(TRAIN_PROMPTS)}"
        raise ConfigError([Violation("data.train_files", run.data.train_files, problem, remedy)])
    prompts = sum(TRAIN_PROMPTS[name] for name in used)
    return max(1, prompts // run.data.train_batch_size) * run.trainer.total_epochs
