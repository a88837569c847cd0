"""Trains a small Llama on Python's own sources with the Hugging Face Trainer, on any number of processes.

    torchrun --standalone --nproc-per-node 2 train.py --per-device 3 --steps 8 --save-dir saved
    torchrun --standalone --nproc-per-node 3 train.py --per-device 2 --steps 40 --resume saved/checkpoint-8

A stock Trainer with its own checkpoints. It goes on in the data by itself as long as per-device x accumulation x
processes stays the same. The lines that samerun adds are marked `# samerun`.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from samerun.integrations.huggingface import SamerunCallback, WithSampleIds  # samerun

PADDING, BLOCK, IGNORE = 256, 24, -100


class Lines(Dataset[dict[str, Tensor]]):
    """Lines of source text, each a sample of up to `BLOCK` bytes, padded."""

    def __init__(self) -> None:
        text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()
        self.lines = [line.strip()[:BLOCK] for line in text.splitlines() if len(line.strip()) > 3]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        line = torch.tensor(list(self.lines[index]))
        padding = BLOCK - len(line)
        return {
            "input_ids": torch.nn.functional.pad(line, (0, padding), value=PADDING),
            "labels": torch.nn.functional.pad(line, (0, padding), value=IGNORE),
        }


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=257,
            hidden_size=28,
            intermediate_size=50,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=BLOCK,
            tie_word_embeddings=True,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-device", type=int, default=3, help="samples of one process in one pass")
    parser.add_argument("--accumulation", type=int, default=2, help="passes per update")
    parser.add_argument("--steps", type=int, default=40, help="train up to this update")
    parser.add_argument("--samples", type=int, help="lines of the text to train on; all by default")
    parser.add_argument("--drop-last", action="store_true", help="leave out what does not fill an epoch's last batch")
    parser.add_argument("--save-dir", default="checkpoints")
    parser.add_argument("--resume", help="a checkpoint directory")
    args = parser.parse_args()

    lines = Lines()
    lines.lines = lines.lines[: args.samples]
    fixed = {name: torch.stack([lines[i][name] for i in range(4)]) for name in ("input_ids", "labels")}

    def evaluate(model: LlamaForCausalLM) -> dict[str, Tensor]:
        logits = model(input_ids=fixed["input_ids"]).logits
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].mT, fixed["labels"][:, 1:], reduction="none")
        return {"losses": losses.sum(1) / (fixed["labels"][:, 1:] != IGNORE).sum(1), "logits": logits}

    settings = TrainingArguments(
        output_dir=args.save_dir,
        per_device_train_batch_size=args.per_device,
        gradient_accumulation_steps=args.accumulation,
        max_steps=args.steps,
        save_steps=args.steps,
        logging_steps=5,
        dataloader_drop_last=args.drop_last,
        learning_rate=3e-3,
        weight_decay=0.1,
        lr_scheduler_type="inverse_sqrt",  # its rate does not depend on the last step
        warmup_steps=4,
        max_grad_norm=0.5,
        seed=3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,  # samerun
    )
    trainer = Trainer(
        model=make_model(),
        args=settings,
        train_dataset=WithSampleIds(lines),  # samerun
        callbacks=[SamerunCallback(evaluate)],  # samerun
    )
    trainer.train(resume_from_checkpoint=args.resume)


if __name__ == "__main__":
    main()
