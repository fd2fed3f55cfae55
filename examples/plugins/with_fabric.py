"""Lightning Fabric's DDP under any launcher; `devices` are the ranks of one host.

mpirun -np 2 dualdist exec examples/plugins/with_fabric.py
"""

import os

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    hosts = int(os.environ["GROUP_WORLD_SIZE"])
    fabric = Fabric(strategy="ddp", devices=int(os.environ["WORLD_SIZE"]) // hosts, num_nodes=hosts)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    x = torch.randn(256, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = torch.nn.Linear(8, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=16, shuffle=True))
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
    loss = fabric.all_reduce(loss.detach()).item()
    if fabric.is_global_zero:
        print(f"{fabric.world_size} ranks, loss {loss:.6f}")
    del model, optimizer  # before their group, else torch 2.13 may abort or hang at the end
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
