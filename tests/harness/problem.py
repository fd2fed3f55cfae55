"""Small training problem: a model, the data of each rank, and the expected result without dualdist."""

import torch

STEPS = 3


def make_model() -> torch.nn.Module:
    """Return a model with the same parameters in every process, one of them unused by the loss."""
    generator = torch.Generator().manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    model.register_parameter("unused", torch.nn.Parameter(torch.empty(2)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator))
    return model


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return the loss on this rank's batch of this step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs, targets = torch.rand(8, 4, generator=generator), torch.rand(8, 2, generator=generator)
    return torch.nn.functional.mse_loss(model(inputs), targets)


def flat(model: torch.nn.Module) -> list[float]:
    """Return all parameters; JSON keeps float32 exactly."""
    values: list[float] = torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
    return values


def trained_by_one_process(size: int) -> list[float]:
    """Return the parameters after STEPS steps of one process that sums all ranks' gradients in order, then divides."""
    model = make_model()
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank in range(size):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            for total, parameter in zip(sums, model.parameters(), strict=True):
                if parameter.grad is not None:
                    total += parameter.grad
        for total, (name, parameter) in zip(sums, model.named_parameters(), strict=True):
            parameter.grad = None if name == "unused" else total / size
        optimizer.step()
    return flat(model)
