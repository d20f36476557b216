"""Write docs/baselines.md: every recipe with its published score, its plan, and what our own runs of it have reached.

    python tools/baselines.py            # writes docs/baselines.md
    python tools/baselines.py --check    # exits with 1 where it is out of date

An own run is ``launch/results/RECIPE.yaml``: hardware, commit, steps, best and final (percent, of the recipe's metric).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

from mcore_rl.config.launch import load_cluster, load_recipe, recipe_names
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.recipe import PublishedConfig, RecipeConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.planning.plan import Plan, plan
from mcore_rl.planning.recipes import num_steps, other_models, recipe_model

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "baselines.md"
RESULTS = ROOT / "launch" / "results"
BAND = 2.0  # points: between evaluations of one run, and between equal runs on two hosts (verl's pull request 7519)
INTRODUCTION = """\
# The field's baselines, as recipes

One row for each run that others have published and this project means to repeat, and for some that nobody has. A recipe
is `launch/recipes/NAME.yaml`: the published settings, translated, with a layout for its cluster. This page is written
by `python tools/baselines.py`.

**None of these runs has been made by this project yet**: there was no accelerator to make them on. Of every recipe a
test holds, on CPU: that it composes and validates with the full-size model; that it is planned and fits its cluster;
that its weights go right at full size, from Hugging Face's files through the training layout into vLLM's; and that its
shadow, the same recipe with a tiny model of the same family, a tiny data set and at most two training processes,
trains. Scores are therefore other people's, and GPUs and hours are [the planner's](planning.md), without validation.

<!-- run: quick -->
```bash
mcore-rl prepare gsm8k --source openai/gsm8k --out data/gsm8k
mcore-rl prepare math --source DigitalLearningGmbH/MATH-lighteval --out data/math
mcore-rl prepare dapo-math --source BytedTsinghua-SIA/DAPO-Math-17k --out data/dapo
mcore-rl prepare aime24 --source BytedTsinghua-SIA/AIME-2024 --out data/aime24
mcore-rl prepare gsm8k-tools --source openai/gsm8k --out data/gsm8k-tools
mcore-rl prepare gsm8k-interaction --source openai/gsm8k --out data/gsm8k-interaction
mcore-rl prepare dapo-interpreter --source BytedTsinghua-SIA/DAPO-Math-17k --out data/dapo-interpreter
mcore-rl prepare aime24-interpreter --source BytedTsinghua-SIA/AIME-2024 --out data/aime24-interpreter
mcore-rl prepare geo3k --source hiyouga/geometry3k --out data/geo3k
mcore-rl prepare eurus2-rl --source PRIME-RL/Eurus-2-RL-Data --out data/eurus2-rl
mcore-rl train recipe=qwen25_05b_ppo
mcore-rl submit recipe=qwen2_7b_grpo cluster=nvidia_h100
```

Models come first:

<!-- run: no, needs the network -->
```bash
hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir models/Qwen2.5-0.5B-Instruct
```

Paths in recipes are relative to where the run is started: `models/`, with the last part of the Hugging Face id, and
`data/`. gemma2_2b_ppo begins with what gemma2_2b_sft leaves. qwen25_math_7b_dapo reads more positions than the model's
config.json says, as the published run did, by `model.config_overrides`.

## Runs

"best" and "final" say which of a run's validations the published score is, where that is known; our own runs are to
give both. A run of ours reaches a score that it comes within {band:g} points of: so much do evaluations of one run, and
equal runs on two hosts, differ.

"""


def main() -> int:
    """Write the page, or say whether it is what would be written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the page is out of date")
    only_check = parser.parse_args().check
    text = page()
    if not only_check:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
        print(f"{PAGE.name} is out of date. Run python tools/baselines.py", file=sys.stderr)
        return 1
    return 0


@cache
def recipe(name: str) -> RunConfig | OfflineConfig:
    """A recipe, composed once."""
    return load_recipe(name)


def page() -> str:
    """The whole page."""
    names = [name for name in recipe_names() if recipe(name).recipe.checkpoint]
    lines = [
        "| run | published | recipe | planned on | a step | steps | hours | our run |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(name) for name in sorted(names, key=lambda name: recipe(name).recipe.published.score is None)),
        "",
        "## What is known of the published runs",
        "",
        *(line for name in names for line in _notes(name, recipe(name).recipe)),
    ]
    return INTRODUCTION.format(band=BAND) + "\n".join(lines) + "\n"


def planned(name: str) -> tuple[Plan, int]:
    """The plan of a recipe on its own cluster, and its steps."""
    run = recipe(name)
    model = recipe_model(run)
    cluster = load_cluster(run.recipe.cluster)
    made = plan(run, model, cluster, other_models(run))
    return made, num_steps(run)


def _row(name: str) -> str:
    about = recipe(name).recipe
    made, steps = planned(name)
    where = f"{made.num_gpus} GPU{'s' * (made.num_gpus > 1)} of {about.cluster}"
    time = f"{made.step_s:.2g} s" if made.step_s < 10 else f"{made.step_s:.0f} s"
    link = f"[{name}](../launch/recipes/{name}.yaml)"
    hours = f"{made.step_s * steps / 3600:.2g}"
    cells = [
        about.title,
        _score(about.published),
        link,
        where,
        time,
        f"{steps:,}",
        hours,
        verdict(name, about.published),
    ]
    return f"| {' | '.join(cells)} |"


def _score(published: PublishedConfig) -> str:
    if published.score is None:
        return "none"
    return f"{published.score:g} {published.of_run}".strip()


def verdict(name: str, published: PublishedConfig, folder: Path = RESULTS) -> str:
    """What our own run of a recipe says of the published score."""
    path = folder / f"{name}.yaml"
    if not path.is_file():
        return "no run yet"
    result = yaml.safe_load(path.read_text(encoding="utf-8"))
    run = (
        f"best {result['best']:.1f}, final {result['final']:.1f} after {result['steps']:,} steps, {result['hardware']}"
    )
    if published.score is None:
        return run
    ours = result["final"] if published.of_run == "final" else result["best"]
    return f"{'reached' if ours >= published.score - BAND else 'not reached'}: {run}"


def _notes(name: str, about: RecipeConfig) -> Iterator[str]:
    published = about.published
    source = "; ".join(part for part in (published.metric, published.source, published.hardware) if part)
    yield f"- **{name}**: {source}. {published.note}".replace("..", ".")


if __name__ == "__main__":
    sys.exit(main())
