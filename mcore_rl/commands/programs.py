"""``mcore-rl train|sft|prefer|reward|generate|evaluate``: overrides to a typed configuration, checked and run."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mcore_rl
from mcore_rl.config.algorithm_registry import algorithms
from mcore_rl.config.bounds import InputDirectory, bound_violations, file_violations
from mcore_rl.config.evaluate import EvaluateConfig, evaluate_violations
from mcore_rl.config.generate import GenerateConfig, generate_violations
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.options import typed
from mcore_rl.config.prefer import PreferConfig
from mcore_rl.config.resources import MODEL_CONFIGS
from mcore_rl.config.reward_training import RewardTrainingConfig
from mcore_rl.config.run import RunConfig, run_violations
from mcore_rl.config.sft import SftConfig
from mcore_rl.config.trainer import PUSH
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any

OVERRIDES = "Overrides are hydra's: key=value, and lists as key=[a,b]. MODEL is a directory, or an id of the Hub."
CHECKED = """\
  mcore-rl {0} --check ...    does it begin, and does it fit here: check all of it, and start nothing
  mcore-rl {0} --cfg ...      what differs from the defaults, as a yaml file to begin with; --cfg all: every key
"""
TRAIN = """\
  mcore-rl train model.path=MODEL data.train_files=[train.parquet] data.val_files=[test.parquet] \\
      algorithm=grpo rollout.n=8 actor.parallel.tp=2 trainer.n_gpus_per_node=8
  mcore-rl train recipe=qwen2_7b_grpo model.path=MODEL         by name, or the path of a yaml file
  mcore-rl train --config-dir my_recipes --config-name gsm8k trainer.total_epochs=3
"""
SFT = """\
  mcore-rl sft model.path=MODEL data.train_files=[train.parquet] data.val_files=[val.parquet] trainer.test_freq=50
  mcore-rl sft recipe=gemma2_2b_sft model.path=MODEL           by name, or the path of a yaml file
"""
PREFER = """\
  mcore-rl prefer model.path=MODEL data.train_files=[pairs.parquet] data.val_files=[held_out.parquet] \\
      actor.preference.loss=dpo actor.preference.beta=0.1 trainer.test_freq=50
"""
REWARD = """\
  mcore-rl reward model.path=MODEL data.train_files=[pairs.parquet] data.val_files=[held_out.parquet] \\
      actor.reward.loss=bradley_terry trainer.test_freq=50
"""
GENERATE = """\
  mcore-rl generate model.path=MODEL data.files=[test.parquet] rollout.n=8 out=answers.parquet
"""
EVALUATE = """\
  mcore-rl evaluate path=answers.parquet out=numbers.json
  mcore-rl evaluate path=answers.parquet k=[1,8] custom_reward_function.path=my_reward.py
  mcore-rl evaluate path=answers.parquet pairs=pairs.parquet   for mcore-rl prefer and reward
"""
EVERY_KEY = "all"  # the word after --cfg
# (what comes before a process is started, the whole run), each of a configuration, with the exit code.  A run that
# trains also takes callbacks.
Acts = tuple[Callable[[Any], int], Callable[..., Coroutine[Any, Any, int]]]


@dataclass(frozen=True)
class Program:
    """One of the main programs, as a command.

    acts: imports what is slow to import; see ``Acts``.
    examples: below its help, with ``more``.  violations: every one that is seen before torch or Ray is imported.
    """

    name: str
    about: str
    schema: type[Any]
    acts: Callable[[], Acts]
    examples: str
    violations: Callable[[Any], list[Violation]] = bound_violations
    more: Callable[[], str] = str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See ``mcore_rl.cli.Command``."""
        parser.description = self.about
        parser.epilog = f"{OVERRIDES}\n\n{self.examples}{CHECKED.format(self.name)}\n{self.more()}"
        parser.add_argument("words", nargs="*", metavar="key=value", help="see below; --cfg all shows all keys")
        parser.add_argument(
            "--config-dir", type=typed(InputDirectory), help="of yaml files of your own, found before ours"
        )
        parser.add_argument("--config-name", help=f"the yaml file to begin with (default: {self.name})")
        cfg = "print what differs from the defaults, as yaml, and stop; --cfg all: every key"
        parser.add_argument("--cfg", action="store_true", help=cfg)
        parser.add_argument("--check", action="store_true", help="check all of it and plan, and start nothing")

    def run(self, options: argparse.Namespace) -> int:
        """See ``mcore_rl.cli.Command``."""
        words = [each for each in options.words if not (options.cfg and each == EVERY_KEY)]
        config = self.composed(words, options.config_dir, options.config_name)
        if options.cfg:
            self._show(config, every_key=EVERY_KEY in options.words)
            return 0
        config = self.ready(config)
        begin(self.name)
        check, act = self.acts()
        return check(config) if options.check else asyncio.run(act(config))

    def _show(self, config: Any, every_key: bool) -> None:
        """Print ``config`` as yaml."""
        from rich.console import Console

        from mcore_rl.config.compose import as_yaml, changes_as_yaml

        if every_key:
            text = as_yaml(config)
        else:
            head = f"# What differs from the defaults of mcore-rl {self.name}; --cfg all shows every key.\n"
            head += f"# As NAME.yaml it is run by mcore-rl {self.name} --config-dir . --config-name NAME\n"
            text = head + changes_as_yaml(config, self.name)
        Console().print(text, markup=False, highlight=False, soft_wrap=True)

    def composed(self, words: Sequence[str], config_dir: Path | None = None, config_name: str | None = None) -> Any:
        """The configuration of ``words``, upon their recipe, the file of the two names, or the defaults."""
        from mcore_rl.config.compose import compose
        from mcore_rl.config.launch import take_recipe

        recipe, overrides = take_recipe(words, self.name)
        if recipe is not None:
            if config_dir or config_name:
                problem = "and --config-dir or --config-name both name a file to begin with"
                raise ConfigError([Violation("recipe", recipe.stem, problem, "Write one of the two")])
            config_dir = recipe.parent
            config_name = recipe.stem
        return compose(self.schema, self.name, overrides, config_dir, config_name)

    def problems(self, config: Any) -> list[Violation]:
        """Everything that is wrong with ``config`` as far as is seen before torch is imported."""
        return _offered([*self.violations(config), *file_violations(config), *_absent(config)])

    def ready(self, config: Any) -> Any:
        """``config`` to be run, with local files for all names; checks everything first, before torch is imported.

        Raises ConfigError, with all violations.
        """
        from mcore_rl.config.hub_files import fetched

        refuse_if_any(self.problems(config))
        _demand_login(config)
        _keep_what_torch_compiles()
        return fetched(config)


def _train() -> Acts:
    from mcore_rl.controller.programs.train import check_training, run_training

    return check_training, run_training


def _sft() -> Acts:
    from mcore_rl.controller.programs.sft import SFT

    return SFT.check, SFT.train


def _prefer() -> Acts:
    from mcore_rl.controller.programs.prefer import PREFER

    return PREFER.check, PREFER.train


def _reward() -> Acts:
    from mcore_rl.controller.programs.reward import REWARD

    return REWARD.check, REWARD.train


def _generate() -> Acts:
    from mcore_rl.controller.programs.generate import check_generate, run_generate

    return check_generate, run_generate


def _evaluate() -> Acts:
    from mcore_rl.controller.programs.evaluate import check_evaluate, run_evaluate

    return check_evaluate, run_evaluate


def begin(name: str) -> None:
    """Print the banner before the slow imports."""
    from rich.console import Console

    Console(stderr=True).print(
        f"mcore-rl {mcore_rl.__version__} {name}: loading torch, and then the run", highlight=False
    )


def _algorithms() -> str:
    """A line of each, for people."""
    lines = [f"  {each.name:<28} {each.about} ({each.paper})" for each in algorithms().values()]
    own = "  FILE.py                      one of your own (docs/algorithms.md)"
    return "\n".join(["algorithm=NAME, where NAME is", *lines, own, ""])


_ALL = (
    Program(
        "train",
        "Reinforcement learning: PPO, GRPO, RLOO and their relatives.",
        RunConfig,
        _train,
        TRAIN,
        run_violations,
        _algorithms,
    ),
    Program("sft", "Supervised fine-tuning on conversations.", SftConfig, _sft, SFT, SftConfig.violations),
    Program(
        "prefer",
        "Learning from answers of which some are preferred: DPO and its relatives.",
        PreferConfig,
        _prefer,
        PREFER,
        PreferConfig.violations,
    ),
    Program(
        "reward",
        "Training a reward model: on pairs of answers, on numbers, or on outcomes.",
        RewardTrainingConfig,
        _reward,
        REWARD,
        RewardTrainingConfig.violations,
    ),
    Program(
        "generate",
        "Responses to the prompts of parquet files.",
        GenerateConfig,
        _generate,
        GENERATE,
        generate_violations,
    ),
    Program(
        "evaluate",
        "Grades generated responses: score, accuracy, pass@k, maj@k.",
        EvaluateConfig,
        _evaluate,
        EVALUATE,
        evaluate_violations,
    ),
)
PROGRAMS = {program.name: program for program in _ALL}


def _absent(config: Any) -> list[Violation]:
    """Loggers whose packages are not here, where the run will be."""
    from mcore_rl.tracking.loggers import absent_loggers

    return absent_loggers(config.trainer.logger) if isinstance(config, (RunConfig, OfflineConfig)) else []


def _demand_login(config: Any) -> None:
    """Raises ConfigError where a run is to push to the Hub, and nobody is logged in there."""
    if isinstance(config, (RunConfig, OfflineConfig)) and config.trainer.push_to_hub is not None:
        from mcore_rl.hub.push import target

        target(config.trainer.push_to_hub, private=True, key=PUSH).demand_login()


def _offered(violations: list[Violation]) -> list[Violation]:
    if not violations:
        return violations  # what is known by name need not be read
    from mcore_rl.families.checkpoints import offered

    return offered(violations, MODEL_CONFIGS)


def _keep_what_torch_compiles() -> None:
    """Lets torch's compiled kernels lie in the user's cache; by itself torch makes a folder in /tmp at its import."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    above = next(path for path in (cache, *cache.parents) if path.exists())
    if os.access(above, os.W_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "mcore_rl" / "torchinductor"))
