# SPDX-License-Identifier: Apache-2.0
"""The `plan` subcommand: reads its arguments, asks the planner, prints the answer for people or as JSON."""

import argparse
import json
from pathlib import Path
from typing import Any

from ds_hybridep.commands import question as asking
from ds_hybridep.commands.page import write_page
from ds_hybridep.commands.plan_page import STYLE, body_of, title_of
from ds_hybridep.errors import ConfigError
from ds_hybridep.plan.answer import Answer
from ds_hybridep.plan.paste import IN_SCRIPT, adapters_of, ds_config_of, launch_of, reminders_of, script_of
from ds_hybridep.plan.planner import answer_of
from ds_hybridep.plan.summary import describe
from ds_hybridep.plan.sweep import describe_sweep, sweep_json, sweep_wan
from ds_hybridep.plan.table import bill_of, chosen_row, row_of_way, rows_of
from ds_hybridep.plan.verdict import is_for_you, verdict
from ds_hybridep.plan.words import wrapped

HELP = "say whether this program is for you, what it brings, and what to write"
DESCRIPTION = """\
Predicts the step time of every layout of a model on a cluster, of what you have now (ZeRO-3, FSDP, DeepSpeed's expert
parallelism, one datacentre alone) and of others, and says whether this program is for you. Ends with a ds_config to
paste. Nothing is run and no GPU is needed. Give the cluster as --dcs with --wan or as --cluster, and the model as
--model.
"""
EXAMPLE = """\
examples:
  ds_hybridep plan --model Qwen3-30B-A3B --dcs 2x8 --wan 10gbps --delay 10ms --tokens 8192 --accumulation 4 \\
      --checkpointing
  ds_hybridep plan --model folder/config.json --lora attention --gpu A100-80 --dcs 2x8 --wan 1gbps
"""
DEFAULT_STEPS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    asking.add_arguments(parser)
    add = parser.add_argument_group("answer").add_argument
    add("--steps", type=int, default=DEFAULT_STEPS, metavar="N", help="for hours and GB; default %(default)s")
    add("--price-per-gb", type=float, metavar="PRICE", help="of what leaves a datacentre, for money in its currency")
    add("--sweep", choices=("wan",), help="instead: what the answer is at each bandwidth between datacentres")
    add("--json", action="store_true", help="print JSON")
    add("--html", type=Path, metavar="FILE", help="write the answer as a page for a browser too")


def run(args: argparse.Namespace) -> int:
    if args.steps < 1 or (args.price_per_gb or 0) < 0:
        raise ConfigError(
            f"--steps and --price-per-gb: got {args.steps} and {args.price_per_gb}, wanted >= 1 and >= 0"
        )
    if args.html is not None and args.sweep is not None:
        raise ConfigError("--html: a page has one answer, but --sweep has many; give one of the two")
    question = asking.read_question(args)
    if args.sweep is not None:
        if question.cluster.sizes[0] == 1:
            raise ConfigError("--sweep: there is one datacentre, so no bandwidth between datacentres; give --dcs 2x8")
        points = sweep_wan(question)
        print(json.dumps({"sweep": sweep_json(points)}, indent=2) if args.json else describe_sweep(question, points))
        return 0
    answer = answer_of(question)
    if args.html is not None:
        write_page(args.html, title_of(answer), body_of(answer, args.steps, args.price_per_gb), STYLE)
    if args.json:
        print(json.dumps(answer_json(answer, args.steps, args.price_per_gb), indent=2))
        return 0
    print(describe(answer, args.steps, args.price_per_gb))
    if is_for_you(answer):
        print("\nds_config.json:\n" + json.dumps(ds_config_of(answer), indent=2))
        if script := script_of(answer):
            print(f"\n{IN_SCRIPT}:\n" + "\n".join(f"  {line}".rstrip() for line in script))
        print("\nStart it:\n" + "\n".join(f"  {line}" for line in launch_of(answer)))
        print("\n".join(map(wrapped, reminders_of(answer))))
    return 0


def answer_json(answer: Answer, steps: int = DEFAULT_STEPS, price_per_gb: float | None = None) -> dict[str, Any]:
    """The whole answer, as JSON values."""
    workload, now, chosen = answer.question.workload, row_of_way(answer, answer.now), chosen_row(answer)
    model = workload.model
    return {
        **answer.to_json(),
        "for_you": is_for_you(answer),
        "verdict": verdict(answer),
        "model": {
            "name": model.name,
            "parameters": model.num_params,
            "active_parameters": model.num_active_params,
            "trained_parameters": workload.num_train_params,
            "autoep": model.autoep_preset,
            "note": model.note,
        },
        "now": now.to_json(),
        "chosen": chosen.to_json(),
        "table": [row.to_json() for row in rows_of(answer)],
        "bills": {
            name: vars(bill_of(row, answer.question, steps, price_per_gb))
            for name, row in (("chosen", chosen), ("now", now))
        },
        "ds_config": None if answer.lacking_bytes else ds_config_of(answer),
        "adapters": adapters_of(answer.question),
        "launch": None if answer.lacking_bytes else launch_of(answer),
    }
