# SPDX-License-Identifier: Apache-2.0
"""Turns what was trained into folders that transformers, peft and vLLM load.

    stored       tensors in the files of torch.save, read piece by piece
    checkpoint   whole parameters of a DeepSpeed checkpoint, from the files of all ranks
    base         the model that was trained: its configuration, its names and shapes, its other files
    names        names of the training, changed into those of the model
    adapters     the layouts of adapters
    folder       a folder of safetensors that is there as a whole or not at all
    writing      goes through a model tensor by tensor, and writes it

Nothing here imports deepspeed, and no more than one parameter of a model is in memory.
"""
