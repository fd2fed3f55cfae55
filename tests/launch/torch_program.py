"""A program for torch.distributed alone, as in its tutorials: DDP and, if asked for, FSDP2, started by `env://`.

    python torch_program.py [fsdp]

Each rank writes a report to the folder of launch.reports().
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 4


class ToyModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = torch.nn.Linear(10, 10)
        self.net2 = torch.nn.Linear(10, 5)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net2(torch.relu(self.net1(batch)))
        return out


def train(model: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        batch, labels = torch.randn(20, 10, generator=generator), torch.randn(20, 5, generator=generator)
        torch.nn.functional.mse_loss(model(batch), labels).backward()
        optimizer.step()


def total(model: torch.nn.Module) -> list[float]:
    full = [getattr(each, "full_tensor", lambda each=each: each)() for each in model.state_dict().values()]
    return [each.double().sum().item() for each in full]


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    replicated, sharded = ToyModel(), ToyModel()
    sharded.load_state_dict(replicated.state_dict())
    replicated = DDP(replicated)
    train(replicated)
    trained = {"ddp": total(replicated.module)}
    if "fsdp" in sys.argv:
        from torch.distributed.fsdp import fully_shard  # takes seconds

        for layer in (sharded.net1, sharded.net2, sharded):
            fully_shard(layer)
        train(sharded)
        trained["fsdp"] = total(sharded)
    seen = {
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "node_rank": int(os.environ["GROUP_RANK"]),
        "local_size": int(os.environ["LOCAL_WORLD_SIZE"]),
        "trained": trained,
    }
    Path(os.environ["TEST_REPORT_DIR"], f"rank-{seen['rank']}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
