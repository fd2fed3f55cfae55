"""A script for Horovod as people have written them: knows nothing of dualdist, and runs on native and Horovod as it is.

    dualdist run -np 2 --as-horovod examples/horovod_script.py

That is torch.distributed, without a Horovod; `--backend horovod` takes the real one, below dualdist's calls. And
`horovodrun -np 2 python examples/horovod_script.py` is Horovod alone.
"""

import argparse

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=32, help="per rank")
parser.add_argument("--lr", type=float, default=0.01)
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)

pixels, labels = load_digits(return_X_y=True)
dataset = torch.utils.data.TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        total += loss.detach().cpu()
    mean = hvd.allreduce(total / len(loader), name="loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}/{args.epochs}: loss {mean.item():.6f}", flush=True)
