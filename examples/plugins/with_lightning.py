"""Lightning's Trainer with DDP under any launcher; `devices` are the ranks of one host.

mpirun -np 2 dualdist exec examples/plugins/with_lightning.py
"""

import os

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Sum(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(256, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    hosts = int(os.environ["GROUP_WORLD_SIZE"])
    trainer = lightning.Trainer(
        strategy="ddp",
        devices=int(os.environ["WORLD_SIZE"]) // hosts,
        num_nodes=hosts,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Sum(), DataLoader(data, batch_size=16, shuffle=True))
    if trainer.is_global_zero:
        print(f"{trainer.world_size} ranks, loss {trainer.callback_metrics['loss']:.6f}")


if __name__ == "__main__":
    main()
