# SPDX-License-Identifier: Apache-2.0
"""Plants faults in copies of the package, one at a time, and runs the quick test that has to notice each.

    .ci/planted_faults.py [--list] [NAME ...]

Without names all faults are planted.  A fault is one text of the package and what stands in its place.  Whoever
rewrites that code writes its row of FAULTS anew: a text that is not found exactly once ends the program.  First the
tests run without a fault and must pass.  The exit status is 1 if a fault escapes.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("ds_hybridep", "tests", "benchmarks", "csrc", "op_builder", "docs", "examples", "ds_configs")
SOME_TEST_FAILED, LIMIT_S = 1, 600


@dataclass(frozen=True)
class Fault:
    """One wrong line.

    path: in the package.  right: text that stands there once.  wrong: what is planted.
    test: the test that fails then; it is not slow.
    """

    name: str
    path: str
    right: str
    wrong: str
    test: str


PLAIN_VERSION = "tests/sync/test_plain_version.py::test_four_ranks_train_what_the_plain_version_says"
FAULTS = (
    Fault(
        "sign of an expert's gradient",
        "experts/gradient_return.py",
        "total.add_(next(iterator))",
        "total.sub_(next(iterator))",
        PLAIN_VERSION,
    ),
    Fault(
        "a rank is left out of a sum",
        "sync/transfers.py",
        "for slot, level, src, messages in self._arrivals:",
        "for slot, level, src, messages in self._arrivals[1:]:",
        "tests/sync/test_level_collectives.py::test_four_ranks_sum_and_gather_like_a_single_process",
    ),
    Fault(
        "a message counts twice",
        "sync/transfers.py",
        "total.add_(message)",
        "total.add_(message, alpha=2)",
        "tests/sync/test_level_collectives.py::test_four_ranks_sum_and_gather_like_a_single_process",
    ),
    Fault(
        "a packet is taken twice",
        "sync/error_feedback.py",
        "orders[0].check(*layout.packets(message, [0]))",
        "pass",
        "tests/sync/test_error_feedback.py::test_a_message_that_is_lost_or_comes_twice_is_an_error",
    ),
    Fault(
        "an expert's gradient is 1% too large",
        "experts/gradient_return.py",
        "[other.add_(own).to(own.dtype)",
        "[other.add_(own).mul_(1.01).to(own.dtype)",
        PLAIN_VERSION,
    ),
    Fault(
        "a residual is dropped",
        "sync/error_feedback.py",
        "Source.RESIDUAL, unscaled, residuals,",
        "Source.RESIDUAL, unscaled, [one.zero_() for one in residuals],",
        "tests/sync/test_error_feedback.py::test_residuals_are_what_was_not_sent",
    ),
    Fault(
        "a skipped step keeps its residuals",
        "sync/error_feedback.py",
        "        self._sent |= self._before\n",
        "        pass\n",
        "tests/experts/test_lossy.py::test_a_skipped_step_leaves_no_trace",
    ),
    Fault(
        "a checkpoint without residuals",
        "sync/error_feedback.py",
        "in (self._sent | self._before).items():",
        "in ():",
        "tests/experts/test_lossy.py::test_a_resumed_training_goes_on_bit_for_bit",
    ),
    Fault(
        "residuals are lost at a change of plan",
        "runtime/codec_state.py",
        "found += collect(replicas, replicas.domain_ranks, self._transport, self._transport.world_size)()",
        "collect(replicas, replicas.domain_ranks, self._transport, self._transport.world_size)()",
        "tests/adaptive/test_replan.py::test_what_codecs_had_kept_back_goes_to_the_owners",
    ),
    Fault(
        "a replica is stale",
        "experts/migration.py",
        "            self._ship(is_exact=False)\n",
        "            self.skip_step()\n",
        PLAIN_VERSION,
    ),
    Fault(
        "a replica of a hot expert is stale",
        "experts/hot.py",
        "return [weights for block, weights in pairs if block.is_trainable or not trainable_only]",
        "return [one.clone() if trainable_only else one for block, one in pairs if block.is_trainable or not "
        "trainable_only]",
        "tests/integration/test_hot_experts.py::test_zero_stages_with_accumulation_and_clipping",
    ),
    Fault(
        "a patch is applied to the wrong base",
        "sync/mirrors.py",
        "self._codec.decode(message, value)",
        "self._codec.decode(message, value.copy_(value.roll(1)))",
        "tests/sync/test_encoded_sync.py::test_patches_train_bit_for_bit_as_exact_weights",
    ),
    Fault(
        "a mean over one rank too many",
        "deepspeed/data_parallel.py",
        "num_ranks = len(sync.ranks) if dp_world_size is None else dp_world_size",
        "num_ranks = (len(sync.ranks) if dp_world_size is None else dp_world_size) + 1",
        "tests/integration/test_parity.py::test_every_plan_of_four_ranks",
    ),
    Fault(
        "a micro-step is lost",
        "sync/group_sync.py",
        "total += earlier",
        "total += 0 * earlier",
        "tests/sync/test_sync_rules.py::test_a_parameter_that_one_micro_step_leaves_out",
    ),
    Fault(
        "a gradient without its gate weight",
        "tokens/layer.py",
        "grad.contiguous(), expert_rows, ctx.routes.slot_to_row, row_weights",
        "grad.contiguous(), expert_rows, ctx.routes.slot_to_row, torch.ones_like(row_weights)",
        "tests/tokens/test_dispatch.py::test_layer_equals_the_dense_one",
    ),
    Fault(
        "a norm for clipping misses what other ranks hold",
        "deepspeed/norms.py",
        "self._squares = found[1:].float()",
        "self._squares = numbers[1:].float()",
        "tests/integration/test_parity.py::test_zero_stages_with_accumulation",
    ),
    Fault(
        "a site keeps the residuals of an exchange that does not count",
        "deepspeed/site_exchange.py",
        "self.packets.transaction.undo()",
        "self.packets.transaction.commit()",
        "tests/sites/test_repeated_exchange.py::test_an_exchange_that_does_not_count_leaves_no_residual",
    ),
)


def copy_of_the_package(folder: Path) -> None:
    for name in COPIED:
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    for path in (*ROOT.glob("*.toml"), *ROOT.glob("*.py"), *ROOT.glob("*.md"), ROOT / "Makefile"):
        shutil.copy(path, folder)


def environment_of(folder: Path) -> dict[str, str]:
    """Return an environment in which the copy is imported in place of the installed package."""
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions"))
    ours = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "TORCH_EXTENSIONS_DIR": extensions}
    return {**os.environ, **ours}


def run_tests(folder: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Return pytest's exit status and its last lines."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    run = subprocess.run(
        [*command, *tests], cwd=folder, env=environment_of(folder), capture_output=True, text=True, timeout=LIMIT_S
    )
    return run.returncode, "\n".join((run.stdout + run.stderr).strip().splitlines()[-15:])


def plant(fault: Fault, folder: Path) -> Path:
    """Put the fault into the copy, and return the changed file.

    Raises SystemExit if its text does not stand there exactly once.
    """
    path = folder / "ds_hybridep" / fault.path
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if (count := text.count(fault.right)) != 1:
        raise SystemExit(
            f"{fault.name!r} cannot be planted: its text stands {count} times in ds_hybridep/{fault.path}; change its "
            f"row in FAULTS, {Path(__file__).name}. The text:\n{fault.right}"
        )
    path.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
    return path


def is_caught(fault: Fault, folder: Path) -> bool:
    changed = plant(fault, folder)
    try:
        status, said = run_tests(folder, [fault.test])
    finally:
        shutil.copy(ROOT / changed.relative_to(folder), changed)
    caught = status == SOME_TEST_FAILED
    print(f"{'caught ' if caught else 'ESCAPED'}  {fault.name}: {fault.test}", flush=True)
    if status not in (0, SOME_TEST_FAILED):
        print(f"  pytest ended with status {status}:\n{said}", flush=True)
    return caught


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="names of the faults and their tests")
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names of faults")
    args = parser.parse_args()
    faults = [one for one in FAULTS if not args.names or any(name in one.name for name in args.names)]
    if args.list or not faults:
        print("\n".join(f"{one.name}: {one.test}" for one in faults or FAULTS))
        return 0 if faults else 2
    with tempfile.TemporaryDirectory(prefix="planted_faults_") as name:
        folder = Path(name)
        copy_of_the_package(folder)
        for fault in faults:  # all texts must be there before the first test runs
            shutil.copy(ROOT / plant(fault, folder).relative_to(folder), folder / "ds_hybridep" / fault.path)
        status, said = run_tests(folder, sorted({one.test for one in faults}))
        if status != 0:
            raise SystemExit(f"the tests fail without a fault, with status {status}:\n{said}")
        escaped = [one.name for one in faults if not is_caught(one, folder)]
    print(f"{len(faults) - len(escaped)} of {len(faults)} faults were caught")
    return 1 if escaped else 0


if __name__ == "__main__":
    sys.exit(main())
