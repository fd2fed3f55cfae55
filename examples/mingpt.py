"""A small GPT that learns to write like Python's reference, character by character.

    dualdist run -np 2 examples/mingpt.py --steps 200

AdamW, clipping, gradients that are added up over --accumulate batches before they travel, and travel in bfloat16. The
text is what `help()` shows, which comes with Python; --text takes any other. With --snapshots DIR a run that is started
again goes on where it was, also in the middle of an epoch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import dualdist as dd
from common import curves
from common.data import not_empty
from common.help import parser
from common.ranks import parameter_hash


class Block(nn.Module):
    """Attention to the characters before, then a small network for each character."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=2)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, characters: int, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.context = context
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """(batch, n) -> (batch, n, characters): scores for the character that follows each one."""
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.characters(text) + self.places(places))))

    @torch.no_grad()
    def write(self, text: torch.Tensor, count: int) -> torch.Tensor:
        """(batch, n) -> (batch, n + count)."""
        for _ in range(count):
            chances = self(text[:, -self.context :])[:, -1].softmax(1)
            text = torch.cat([text, chances.multinomial(1)], dim=1)
        return text


class Passages(Dataset):
    """The text in pieces of `context` characters, each with the characters that follow."""

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.text[number * self.context : (number + 1) * self.context + 1]
        return piece[:-1], piece[1:]


def train(
    model: GPT, optimizer: torch.optim.Optimizer, sampler: dd.Sampler, passages: Dataset, options: argparse.Namespace
) -> None:
    """All steps, from the last snapshot on where there is one."""
    loader = not_empty(dd.loader(passages, options.batch_size, sampler=sampler, drop_last=True))
    state = {"model": model, "optimizer": optimizer, "sampler": sampler}
    found = dd.load_checkpoint(options.snapshots, **state) if options.snapshots else None
    step = found["step"] if found else 0
    if found:
        dd.print(f"goes on after step {step}")
    curve, backwards = curves.Curves(options), step * options.accumulate
    while step < options.steps:
        for seen, following in loader:  # from where the snapshot was taken, in the middle of an epoch
            scores = model(seen.to(dd.device()))
            loss = F.cross_entropy(scores.flatten(0, 1), following.to(dd.device()).flatten())
            (loss / options.accumulate).backward()
            backwards += 1
            step, is_between = divmod(backwards, options.accumulate)
            if is_between:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 or step % 10 == 0:
                mean = dd.allreduce(loss.detach()).item()
                curve.add(step, loss=mean)
                dd.print(f"step {step}/{options.steps}: loss {mean:.4f}")
            if options.snapshots and (step % options.every == 0 or step == options.steps):
                dd.save_checkpoint(options.snapshots, **state, step=step)
            if step == options.steps:
                break
    curve.close()


def main() -> None:
    options = parse()
    dd.init()
    torch.manual_seed(0)
    text = options.text.read_text("utf-8") if options.text else "\n\n".join(topics.values())
    alphabet = sorted(set(text))
    number = {character: n for n, character in enumerate(alphabet)}
    passages = Passages(torch.tensor([number[character] for character in text]), options.context)

    model = GPT(len(alphabet), options.context, options.layers, heads=4, width=options.width).to(dd.device())
    dd.broadcast_parameters(model)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], options.lr)
    dd.wrap_optimizer(optimizer, model.named_parameters(), accumulate=options.accumulate, compression="bf16")
    train(model, optimizer, dd.Sampler(passages, remainder="drop"), passages, options)
    dd.print(f"every rank has the parameters {parameter_hash(model):.16}")
    if dd.rank() == 0:
        start = torch.tensor([[number[text[0]]]], device=dd.device())
        print("".join(alphabet[n] for n in model.eval().write(start, options.write)[0].tolist()))
    dd.shutdown()


def parse() -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("--text", type=Path, metavar="FILE", help="what to learn")
    flags.add_argument("--steps", type=int, default=100, help="steps of the optimizer")
    flags.add_argument("--batch-size", type=int, default=16, help="passages per rank, in each backward")
    flags.add_argument("--accumulate", type=int, default=2, help="backwards before each step")
    flags.add_argument("--context", type=int, default=64, help="characters that are seen together")
    flags.add_argument("--layers", type=int, default=2, help="attention blocks")
    flags.add_argument("--width", type=int, default=64, help="numbers for each character")
    flags.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    flags.add_argument("--write", type=int, default=200, metavar="N", help="characters to write at the end")
    flags.add_argument("--snapshots", metavar="DIR", help="keep them there, and go on from the last")
    flags.add_argument("--every", type=int, default=50, metavar="N", help="steps between two snapshots")
    curves.add_flags(flags)
    return flags.parse_args()


if __name__ == "__main__":
    main()
