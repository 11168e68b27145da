# SPDX-License-Identifier: Apache-2.0
"""user_script.py with accelerate's `Accelerator`, which is told of the ds_config by `accelerate launch`."""

import json

from accelerate import Accelerator, PartialState
from accelerate.utils import DummyOptim
from torch.utils.data import DataLoader
from toy_model import ToyConfig, batch, build_model

PartialState(backend="gloo")  # on CPUs; otherwise each rank would be a job of its own
accelerator = Accelerator()
rank, toy = accelerator.process_index, ToyConfig(ep_size=2)
model = build_model(toy, rank=rank, world_size=2, data_before_expert=False, seed=1)
loader = DataLoader(range(100), batch_size=4)  # accelerate reads the size of a batch off it
engine, optimizer, _ = accelerator.prepare(model, DummyOptim(model.parameters()), loader)
losses = []
for step in range(4):
    loss = engine(*batch(toy, seed=1, step=step, micro_step=0, rank=rank, num_sequences=2))
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
accelerator.print("losses", json.dumps(losses), flush=True)
accelerator.end_training()
