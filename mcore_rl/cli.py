"""``mcore-rl train|sft|generate|evaluate|doctor``: overrides to a typed configuration, which is checked and run.

Every mistake of the user's is one message and exit code 2, without a traceback; ``--debug`` shows it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from mcore_rl.config.algorithm_registry import algorithms
from mcore_rl.config.bounds import InputDirectory, bound_violations, file_violations
from mcore_rl.config.compose import as_yaml, compose
from mcore_rl.config.evaluate import EvaluateConfig, evaluate_violations
from mcore_rl.config.generate import GenerateConfig, generate_violations
from mcore_rl.config.options import check_options, typed
from mcore_rl.config.run import RunConfig, run_violations
from mcore_rl.config.sft import SftConfig, sft_violations
from mcore_rl.doctor import arguments as doctor
from mcore_rl.errors import McoreRLError, Violation, refuse_if_any
from mcore_rl.tracking.secrets import redacted

EPILOG = """\
Overrides are hydra's: key=value, lists as key=[a,b], and algorithm=NAME for all that belongs to an algorithm.

  mcore-rl train model.path=MODEL data.train_files=[train.parquet] data.val_files=[test.parquet] \\
      algorithm=grpo rollout.n=8 actor.parallel.tp=2 actor.parallel.ep=2 trainer.n_gpus_per_node=8
  mcore-rl train --config-dir my_recipes --config-name gsm8k trainer.total_epochs=3
  mcore-rl train --cfg algorithm=dapo          what would be run, as yaml, without running it
"""


@dataclass(frozen=True)
class Program:
    """One of the main programs.

    run: returns the exit code.  epilog: below its help.  check: every violation, seen before torch or Ray is imported.
    """

    help: str
    schema: type[Any]
    run: Callable[[Any], int]
    epilog: str = EPILOG
    check: Callable[[Any], list[Violation]] = bound_violations


def _train(config: RunConfig) -> int:
    from mcore_rl.controller.programs.train import run_training

    return asyncio.run(run_training(config))


def _sft(config: SftConfig) -> int:
    from mcore_rl.controller.programs.sft import run_sft

    return asyncio.run(run_sft(config))


def _generate(config: GenerateConfig) -> int:
    from mcore_rl.controller.programs.generate import run_generate

    return asyncio.run(run_generate(config))


def _evaluate(config: EvaluateConfig) -> int:
    from mcore_rl.controller.programs.evaluate import run_evaluate

    return asyncio.run(run_evaluate(config))


def _algorithms() -> str:
    """A line of each, for people."""
    lines = [f"  {each.name:<28} {each.about} ({each.paper})" for each in algorithms().values()]
    own = "  FILE.py                      one of your own (docs/algorithms.md)"
    return "\n".join(["algorithm=NAME, where NAME is", *lines, own, ""])


PROGRAMS = {
    "train": Program(
        "reinforcement learning: PPO, GRPO, RLOO and their relatives",
        RunConfig,
        _train,
        f"{EPILOG}\n{_algorithms()}",
        run_violations,
    ),
    "sft": Program("supervised fine-tuning on conversations", SftConfig, _sft, check=sft_violations),
    "generate": Program(
        "responses to the prompts of parquet files", GenerateConfig, _generate, check=generate_violations
    ),
    "evaluate": Program(
        "grade generated responses: score, accuracy, pass@k, maj@k",
        EvaluateConfig,
        _evaluate,
        check=evaluate_violations,
    ),
}


DOCTOR = "doctor"  # it has options in place of a configuration


def _doctor(options: argparse.Namespace) -> int:
    from mcore_rl.doctor.command import run_doctor

    return run_doctor(options)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="mcore-rl", description=__doc__.split("\n")[0])
    programs = top.add_subparsers(dest="program", required=True, metavar="|".join([*PROGRAMS, DOCTOR]))
    for name, program in PROGRAMS.items():
        sub = programs.add_parser(
            name, help=program.help, description=program.help, epilog=program.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        sub.add_argument("overrides", nargs="*", metavar="key=value", help="see below; --cfg shows all keys")
        sub.add_argument(
            "--config-dir", type=typed(InputDirectory), help="of yaml files of your own, found before ours"
        )
        sub.add_argument("--config-name", help=f"the yaml file to begin with (default: {name})")
        sub.add_argument("--cfg", action="store_true", help="print the composed configuration and stop")
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
    sub = programs.add_parser(
        DOCTOR, help=doctor.HELP, description=doctor.HELP, epilog=doctor.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    doctor.add_arguments(sub)
    sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a program; its exit code: 0, 1 where it says so, 2 on a user's mistake, 130 on Ctrl-C."""
    top = parser()
    chosen, more = top.parse_known_args(arguments)  # argparse takes no override after an option by itself
    if flags := [text for text in more if text.startswith("-")]:
        top.error(f"unrecognized arguments: {' '.join(flags)}")
    chosen.overrides += more
    errors = Console(stderr=True, emoji=False)
    try:
        check_options(chosen, top)
        if chosen.program == DOCTOR:
            return _doctor(chosen)
        program = PROGRAMS[chosen.program]
        config = compose(program.schema, chosen.program, chosen.overrides, chosen.config_dir, chosen.config_name)
        if chosen.cfg:
            Console().print(as_yaml(config), markup=False, highlight=False, soft_wrap=True)
            return 0
        ready(program, config)
        return program.run(config)
    except McoreRLError as error:
        if chosen.debug:
            raise
        notes = [str(note) for note in error.__dict__.get("__notes__", ())]
        text = redacted("\n".join([f"error: {error}", *notes]))
        errors.print(text, markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        errors.print("Stopped.", markup=False)
        return 130


def ready(program: Program, config: Any) -> None:
    """What precedes a program's run: every check, before torch is imported.  ConfigError, with all violations."""
    refuse_if_any([*program.check(config), *file_violations(config)])
    _keep_what_torch_compiles()


def _keep_what_torch_compiles() -> None:
    """Lets torch's compiled kernels lie in the user's cache; by itself torch makes a folder in /tmp at its import."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    above = next(path for path in (cache, *cache.parents) if path.exists())
    if os.access(above, os.W_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "mcore_rl" / "torchinductor"))


if __name__ == "__main__":
    sys.exit(main())
