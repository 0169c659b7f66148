"""A training loop with an Accelerator, which knows nothing of ort_accel but for what it writes down at the end."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ort_accel

WIDTH = 520  # each layer is larger than the first of the buckets in which DDP sends gradients


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, inputs, labels):
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return nn.functional.mse_loss(inputs, labels)


def main(out):
    accelerator = Accelerator()
    set_seed(7)
    model = Net()
    data = TensorDataset(torch.randn(24, WIDTH), torch.randn(24, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    loader = DataLoader(data, batch_size=8 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(*batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    raw = accelerator.unwrap_model(model)
    try:
        report = ort_accel.report(raw).to_dict()
    except ort_accel.OrtAccelError:
        report = None
    keys = list(accelerator.get_state_dict(model) or ())  # some have it on the main process only
    if accelerator.is_main_process:
        found = {
            "losses": losses,
            "weight": raw.layers[0].weight.abs().sum().item(),
            "keys": keys,
            "report": report,
            "processes": accelerator.num_processes,
            "arguments": sys.argv[2:],
        }
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
