# SPDX-License-Identifier: Apache-2.0
"""A user's training script with accelerate's `Accelerator`, which is told of the ds_config by `accelerate launch`."""

import json

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DummyOptim
from launcher_script import Model, batch
from torch.utils.data import DataLoader

PartialState(backend="gloo")  # on CPUs; otherwise each rank would be a job of its own
accelerator = Accelerator()
torch.manual_seed(0)
model = Model(accelerator.num_processes)
loader = DataLoader(range(100), batch_size=4)  # accelerate reads the size of a batch off it
engine, optimizer, _ = accelerator.prepare(model, DummyOptim(model.parameters()), loader)
data = torch.Generator().manual_seed(accelerator.process_index)
losses = []
for _ in range(3):
    loss = engine(batch(data))
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
accelerator.print("losses", json.dumps(losses), flush=True)
accelerator.end_training()
