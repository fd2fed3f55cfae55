"""Accelerate's DDP under any launcher.

mpirun -np 2 dualdist exec examples/plugins/with_accelerate.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    x = torch.randn(256, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16, shuffle=True))
    for _ in range(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
    loss = accelerator.gather(loss.detach()).mean().item()
    if accelerator.is_main_process:  # accelerator.print() prints once a host
        print(f"{accelerator.num_processes} ranks, loss {loss:.6f}")
    del model, optimizer
    accelerator.free_memory()  # before their group, else torch 2.13 may hang at the end
    accelerator.end_training()


if __name__ == "__main__":
    main()
