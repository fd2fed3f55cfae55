"""DeepSpeed's ZeRO-1 under any launcher.

mpirun -np 2 dualdist exec examples/plugins/with_deepspeed.py
"""

import deepspeed
import torch

SETTINGS = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}


def main() -> None:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=SETTINGS)
    generator = torch.Generator().manual_seed(deepspeed.comm.get_rank())
    for _ in range(24):
        x = torch.randn(16, 8, generator=generator)
        loss = torch.nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
    loss = loss.detach() / deepspeed.comm.get_world_size()
    deepspeed.comm.all_reduce(loss)
    if deepspeed.comm.get_rank() == 0:
        print(f"{deepspeed.comm.get_world_size()} ranks, loss {loss:.6f}")


if __name__ == "__main__":
    main()
