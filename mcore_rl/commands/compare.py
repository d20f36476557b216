"""Hold vLLM's log-probs against those of transformers and of Megatron, token by token, and name what makes them differ.

    mcore-rl compare --hf Qwen2.5-0.5B --layout tp=2 --data prompts.parquet --out report.json
    mcore-rl compare --hf Mixtral-8x7B --megatron step_100 --layout tp=2,ep=2 --rollout tp=2 \\
        --data prompts.parquet --dtype bfloat16 --out report.json

vLLM draws responses with the weights of --hf; transformers scores the same tokens with them, and Megatron in --layout
with them or with those of --megatron.  docs/logprobs.md says how to read the report.  Exits with 0; with 1 where the
three have not the same model (weights, configuration) or differ more than rounding does; and with 2 on a mistake of the
command line or of what it names.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mcore_rl.config.bounds import (
    InputDirectory,
    InputFile,
    InputModel,
    NonNegativeFloat,
    OutputFile,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Seed,
)
from mcore_rl.config.engine import Precision
from mcore_rl.config.options import typed
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.rollout import Quantization, TopK, ValidationConfig, draw_violations, parse_rollout_layout
from mcore_rl.families.config_changes import add_change_options, changed_directory, changes_asked
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any

if TYPE_CHECKING:
    from mcore_rl.reports.report import LogprobReport, RoundingReport

MAX_WORST_SHOWN = 3
SPELT = {"parallel.": "--layout "} | {f"rollout.{axis}": f"--rollout {axis}" for axis in ("tp", "dp", "ep")}
SPELT |= {"rollout.quantization": "--quantization", "rollout.dtype": "--dtype"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See ``mcore_rl.cli.Command``."""
    parser.description = __doc__
    parser.set_defaults(spelt=SPELT)
    what = parser.add_argument_group("what is compared")
    what.add_argument(
        "--hf",
        type=typed(InputModel),
        required=True,
        help="directory with config.json, *.safetensors and tokenizer, or a Hub id",
    )
    what.add_argument(
        "--megatron", type=typed(InputDirectory), help="a Megatron checkpoint of the same model, for Megatron's side"
    )
    what.add_argument(
        "--layout",
        type=typed(parse_layout),
        default="",
        help="of Megatron, as tp=2,pp=2,ep=2; one replica is started here",
    )
    add_change_options(what)
    what.add_argument("--rollout", type=typed(parse_rollout_layout), default="", help="of vLLM, as tp=2 or tp=2,ep=2")
    beside = "of all three (float32); for bfloat16, transformers and Megatron compute in float32 too, to compare"
    what.add_argument("--dtype", choices=[p.value for p in Precision], default="float32", help=beside)
    form = "of vLLM's matrices; the difference is then split into weights, activations and kernels (docs/fp8.md)"
    what.add_argument("--quantization", choices=[q.value for q in Quantization], default="none", help=form)
    draw = parser.add_argument_group("what is drawn")
    columns = "parquet with a column prompt (messages or text) or prompt_token_ids"
    draw.add_argument("--data", type=typed(InputFile), required=True, help=columns)
    draw.add_argument("--num-prompts", type=typed(PositiveInt), default=32, help="from the first row on (32)")
    draw.add_argument("--samples", type=typed(PositiveInt), default=1, help="responses of each prompt (1)")
    draw.add_argument("--max-tokens", type=typed(PositiveInt), default=128, help="of a response (128)")
    draw.add_argument(
        "--temperature", type=typed(PositiveFloat), default=1.0, help="of vLLM's draws, and of all log-probs (1.0)"
    )
    draw.add_argument(
        "--top-p", type=typed(PositiveShare), default=1.0, help="of vLLM's draws, to see what cutting does (1.0: not)"
    )
    draw.add_argument("--top-k", type=typed(TopK), default=-1, help="likewise (-1: not)")
    draw.add_argument("--seed", type=typed(Seed), default=0, help="of the draws (0)")
    limits = parser.add_argument_group(
        "what is demanded of every pair, in nats",
        "Exit code 1 where it is not met. With --quantization the defaults are not demanded of vLLM.",
    )
    limits.add_argument(
        "--max-abs-diff",
        type=typed(NonNegativeFloat),
        help="the largest difference of a token (float32: 1e-4, bfloat16: 1.0)",
    )
    limits.add_argument(
        "--mean-abs-diff",
        type=typed(NonNegativeFloat),
        help="the mean over all tokens (float32: 1e-5, bfloat16: 0.03)",
    )
    parser.add_argument("--out", type=typed(OutputFile), required=True, help="where the report goes, as JSON")


def ask(arguments: argparse.Namespace, console: Console) -> LogprobReport:
    """Measure, behind a line that says what is done."""
    draws = ValidationConfig(temperature=arguments.temperature, top_p=arguments.top_p, top_k=arguments.top_k)
    refuse_if_any([replace(each, key=f"-{each.key.replace('_', '-')}") for each in draw_violations(draws, "-")])
    if not arguments.out.parent.is_dir():
        raise ConfigError([Violation("out", str(arguments.out), "its directory is not there", "Make it first")])
    from mcore_rl.reports.prompts import load_tokenizer, read_prompts  # torch and vLLM, when all is checked
    from mcore_rl.reports.question import Question
    from mcore_rl.reports.scoring import measure, report
    from mcore_rl.rollout.protocol import Sampling

    sampling = Sampling(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    question = Question(
        hf=arguments.hf,
        megatron=arguments.megatron,
        layout=arguments.layout,
        rollout=arguments.rollout,
        dtype=Precision(arguments.dtype),
        sampling=sampling,
        quantization=Quantization(arguments.quantization),
        n=arguments.samples,
    )
    tokenizer = load_tokenizer(arguments.hf)
    prompts = read_prompts(arguments.data, tokenizer, arguments.num_prompts)
    with console.status("...") as status:
        measured = measure(question, prompts, status.update)
    return report(question, measured, tokenizer, max_abs=arguments.max_abs_diff, mean_abs=arguments.mean_abs_diff)


def show(compared: LogprobReport, console: Console) -> None:
    """The report, to read."""
    from mcore_rl.reports.report import RATIO_BOUNDS

    console.print(f"{compared.num_tokens} tokens drawn by vLLM; differences in nats")
    lines = Table("", *(f"{pair.first} - {pair.second}" for pair in compared.pairs), box=None, pad_edge=False)
    for name, field in (("maximum", "max_abs"), ("mean", "mean_abs"), ("bias", "mean")):
        lines.add_row(name, *(f"{getattr(pair, field):.1e}" for pair in compared.pairs))
    for quantile in compared.pairs[0].quantiles:
        lines.add_row(f"{float(quantile):.1%}", *(f"{pair.quantiles[quantile]:.1e}" for pair in compared.pairs))
    lines.add_row("ratio", *(f"{pair.ratio_min:.4f} to {pair.ratio_max:.4f}" for pair in compared.pairs))
    low, high = RATIO_BOUNDS
    lines.add_row(f"not in [{low}, {high}]", *(f"{pair.ratio_outside:.2%}" for pair in compared.pairs))
    for number, positions in enumerate(compared.pairs[0].bins):
        means = (f"{pair.bins[number].mean_abs:.1e}" for pair in compared.pairs)
        lines.add_row(f"mean at {positions.begin}-{positions.end - 1}", *means)
    console.print(lines)
    if compared.top1 is not None:
        shares = ", ".join(f"{name} {share:.2%}" for name, share in compared.top1.agreement.items())
        console.print(
            f"of {compared.top1.count} tokens that are likeliest by vLLM, so too by: {shares}", soft_wrap=True
        )
    if compared.rounding is not None:
        show_rounding(compared.rounding, console)
    for token in compared.worst[:MAX_WORST_SHOWN]:
        values = ", ".join(f"{name} {value:.5f}" for name, value in token.logprobs.items())
        place = f"prompt {token.prompt}, sample {token.sample}, position {token.position}"
        console.print(f"{token.difference:.1e} at {place}: {values}: {token.text!r}", markup=False, soft_wrap=True)
    causes = Table("", "cause", "evidence", box=None, pad_edge=False)
    marks = {True: "[red]FOUND[/red]", False: "[green]no[/green]", None: "-"}
    for finding in compared.findings:
        causes.add_row(marks[finding.found], finding.cause.value, escape(finding.evidence))
    console.print(causes)
    for words in compared.exceeded:
        console.print(f"[red]EXCEEDED[/red] {words}", soft_wrap=True)
    console.print(compared.verdict, markup=False, soft_wrap=True)


def show_rounding(parts: RoundingReport, console: Console) -> None:
    """What of the difference weights, activations and kernels make."""
    lines = Table("rounded, mean (max)", "weights dequantised", "activations emulated", box=None, pad_edge=False)
    for each in parts.effects:
        weights = f"{each.weights_mean:.1e} ({each.weights_max:.1e})"
        lines.add_row(each.group, weights, f"{each.activations_mean:.1e} ({each.activations_max:.1e})")
    console.print(lines)
    expected = f"all rounding makes {parts.expected_mean:.1e} ({parts.expected_max:.1e}) in transformers"
    plain = f"bfloat16 alone {parts.bfloat16_mean:.1e} ({parts.bfloat16_max:.1e})"
    whole = f"vllm is {parts.whole_mean:.1e} ({parts.whole_max:.1e}) from transformers in float32"
    left = f"{parts.left_mean:.1e} ({parts.left_max:.1e}) are between vllm and transformers so rounded"
    console.print(f"{whole}; {expected}, {plain}; {left}", soft_wrap=True)


def run(options: argparse.Namespace) -> int:
    """See ``mcore_rl.cli.Command``; 1 where the report is not sound."""
    with ExitStack() as stack:
        options.hf = changed_directory(options.hf, changes_asked(options), stack)
        compared = ask(options, Console(stderr=True, emoji=False, soft_wrap=True))
    options.out.write_text(json.dumps(compared.as_json(), indent=2) + "\n", encoding="utf-8")
    show(compared, Console(highlight=False))
    return 0 if compared.is_sound else 1
