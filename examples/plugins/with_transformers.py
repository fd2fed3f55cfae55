"""Hugging Face's Trainer with DDP on a tiny model under any launcher.

mpirun -np 2 dualdist exec examples/plugins/with_transformers.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def main() -> None:
    torch.manual_seed(0)
    texts = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (64, 16))]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            use_cpu=not torch.cuda.is_available(),
            max_steps=8,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=settings, train_dataset=texts)
        loss = trainer.train().training_loss
    if settings.process_index == 0:
        print(f"{settings.world_size} ranks, loss {loss:.6f}")


if __name__ == "__main__":
    main()
