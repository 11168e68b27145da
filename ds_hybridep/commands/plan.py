# SPDX-License-Identifier: Apache-2.0
"""The `plan` subcommand: reads its arguments, asks the planner, prints the answer as a table or as JSON."""

import argparse
import json
from typing import Any

from ds_hybridep.commands import question as asking
from ds_hybridep.plan.answer import Answer
from ds_hybridep.plan.planner import make_plan
from ds_hybridep.plan.summary import describe, ds_config_block, verdict

HELP = "predict step times and choose domain sizes"
DESCRIPTION = """\
Predicts the step time of every plan for a model on a cluster and says which to use, or that something else is better.
Nothing is run and no GPU is needed. Give the cluster as --cluster or as --dcs with --wan, and the model as
--model.
"""
EXAMPLE = """\
example:
  ds_hybridep plan --model Qwen3-30B-A3B --dcs 2x8 --wan 10gbps --delay 10ms --tokens 16384
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    asking.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    question = asking.read_question(args)
    answer = make_plan(question)
    if args.json:
        print(json.dumps(answer_json(answer), indent=2))
        return 0
    print(describe(answer))
    if answer.better is None:
        print("\nFor ds_config.json:\n" + json.dumps(ds_config_block(answer), indent=2))
    return 0


def answer_json(answer: Answer) -> dict[str, Any]:
    """The plan and the other predictions, as JSON values."""
    return {
        **answer.to_json(),
        "verdict": verdict(answer),
        "ds_config": ds_config_block(answer),
    }
