# SPDX-License-Identifier: Apache-2.0
"""One rank of a training on a device, compared with unmodified DeepSpeed: for test_device_training.py.

    RANK=0 WORLD_SIZE=2 ... DS_ACCELERATOR=cuda python device_script.py cuda [side]

All ranks share one device, so they talk over gloo.  "side": the script trains in a stream of its own.  Prints one line
of JSON for each case: what is wrong.
"""

import dataclasses
import json
import sys

import ds_hybridep._autoload

ds_hybridep._autoload.install()  # before deepspeed's engine is imported

import deepspeed  # noqa: E402
import parity  # noqa: E402
import torch  # noqa: E402
from toy_model import ToyConfig  # noqa: E402

from ds_hybridep import stats  # noqa: E402

TOY = ToyConfig(ep_size=2, num_experts=4, hidden=32, ffn=64)
CASES = {
    "exact": parity.Case(levels=(("dc", 2, 2),), toy=TOY),
    "accumulated": parity.Case(levels=(("dc", 2, 2),), toy=TOY, accumulation=2, zero_stage=1),
    "tokens only": parity.Case(levels=(("dc", 2, 1),), toy=TOY),
    "bf16": parity.Case(
        levels=(("dc", 2, 2),), toy=dataclasses.replace(TOY, routing="by_token"), dtype="bf16", zero_stage=1
    ),
}


def train_lossy(case: parity.Case) -> list[str]:
    """Codecs both ways, verified at every step; what is wrong with the losses."""
    parity.use_expert_groups_of(case)
    torch.manual_seed(case.seed)
    model, config = parity.model_of(case, seed=case.seed), case.ds_config(with_block=True)
    config["hybridep"]["advanced"]["verify_interval"] = 1
    config["hybridep"]["levels"][0].update(weight_codec="int8", gradient_codec={"type": "low_rank", "rank": 4})
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for step in range(10):
        loss = parity.loss_of(engine, case, *parity._batch_of(case, step, 0))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    ratio = stats(engine)["layers"][0]["codecs"]["weight_ratio"]
    engine.destroy()
    problems = [] if losses[-1] < 0.9 * losses[0] else [f"losses {losses} do not fall"]
    return problems if ratio > 3 else [*problems, f"weights were sent {ratio} times smaller"]


def main(device_type: str, *words: str) -> None:
    device = torch.device(device_type, 0) if device_type != "cpu" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    made_on_cpu = parity.batch

    def batch_on_device(*args, **kwargs):
        return tuple(tensor.to(device) for tensor in made_on_cpu(*args, **kwargs))

    parity.batch = batch_on_device
    if "side" in words:
        torch.cuda.set_stream(torch.cuda.Stream(device))
    for name, case in CASES.items():
        problems = parity.numeric_problems(case, [parity.run_case(case)])
        print(json.dumps({"case": name, "problems": problems}), flush=True)
    print(json.dumps({"case": "lossy", "problems": train_lossy(CASES["exact"])}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
