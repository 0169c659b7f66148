"""A loop whose second process is killed in its third step, while the others wait for its gradients."""

import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn


def main(out):
    accelerator = Accelerator()
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(6):
        if step == 2 and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        Path(out, f"{accelerator.process_index} {step}").touch()


if __name__ == "__main__":
    main(sys.argv[1])
