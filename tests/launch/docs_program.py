"""Run blocks of Python of the manual, on every rank, one after the other: docs_program.py BLOCKS.json.

A block with dd.init() or init_process_group() is a program. Any other one is part of one: it runs in a session, with
torch, dd, a model, an optimizer.
"""

import json
import os
import sys
from pathlib import Path

import torch

import dualdist as dd

for where, text in json.loads(Path(sys.argv[1]).read_text()):
    names = {"__name__": "__main__"}
    folder = f"{where}".replace("/", "-")
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    if "dd.init(" not in text and "init_process_group(" not in text:
        dd.init(timeout_s=60)
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names.update(torch=torch, dd=dd, model=model, optimizer=optimizer)
    exec(compile(text, where, "exec"), names)
    if dd.is_initialized():
        dd.shutdown()
    os.chdir("..")
    print(f"ran {where}.", flush=True)
    torch.manual_seed(0)
