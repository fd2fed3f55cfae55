"""ignite's idist and engine under any launcher.

mpirun -np 2 dualdist exec examples/plugins/with_ignite.py
"""

import ignite.distributed as idist
import torch
from ignite.engine import create_supervised_trainer
from torch.utils.data import TensorDataset


def train(local_rank: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = idist.auto_model(torch.nn.Linear(8, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = idist.auto_dataloader(data, batch_size=16 * idist.get_world_size(), shuffle=True)
    trainer = create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss, device=idist.device())
    trainer.run(loader, max_epochs=3)
    loss = idist.all_reduce(trainer.state.output) / idist.get_world_size()
    if idist.get_rank() == 0:
        print(f"{idist.get_world_size()} ranks, loss {loss:.6f}")


if __name__ == "__main__":
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    with idist.Parallel(backend=backend) as parallel:
        parallel.run(train)
