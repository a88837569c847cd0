"""Real text that every machine has: the sources of Python's own standard library, as bytes, cut into samples.

Files are cut into paragraphs (at empty lines) and those into blocks, so the last sample of each paragraph is shorter
than the others: samples differ in how many valid tokens they hold, as they do in real training.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from model import BEGIN, END, NUM_TOKENS, PADDING
from torch import Tensor
from torch.utils.data import Dataset

IGNORE = -100  # the target of a padded position: not a valid token


@dataclass(frozen=True)
class Batch:
    """One microbatch. Shapes `(samples, block)`; `ids` are the samples' numbers in the data set."""

    ids: list[int]
    inputs: Tensor
    targets: Tensor

    @property
    def valid_tokens(self) -> int:
        return int((self.targets != IGNORE).sum())


class SourceText(Dataset):
    """Sample i is (i, inputs, targets): up to `block` tokens of one paragraph and the token that follows each."""

    def __init__(self, files: Sequence[Path], block: int) -> None:
        self.block = block
        self.texts: list[Tensor] = []
        self.samples: list[tuple[int, int, int]] = []  # (file, first token, one past the last)
        digest = hashlib.sha256()
        for path in files:
            data = path.read_bytes()
            digest.update(data)
            ends = [match.end() + 1 for match in re.finditer(rb"\n\n+", data)]
            for start, end in itertools.pairwise([0, *ends, len(data) + 1]):
                self.samples += [(len(self.texts), at, min(at + block, end)) for at in range(start, end, block)]
            text = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(torch.int16) if data else torch.empty(0)
            self.texts.append(torch.cat([torch.tensor([BEGIN]), text, torch.tensor([END])]).to(torch.int16))
        self.fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        file, start, end = self.samples[index]
        window = self.texts[file][start : end + 1].long()
        return index, window[:-1], window[1:]

    def collate(self, samples: Sequence[tuple[int, Tensor, Tensor]]) -> Batch:
        """Pads samples into a batch. No samples give one row without any valid token: a pass with nothing to add.

        A rank whose share of a pass is empty still runs it, because the other ranks wait for it in the collectives.
        """
        inputs = torch.full((max(1, len(samples)), self.block), PADDING)
        targets = torch.full_like(inputs, IGNORE)
        for row, (_, tokens, following) in enumerate(samples):
            inputs[row, : len(tokens)] = tokens
            targets[row, : len(following)] = following
        return Batch([index for index, _, _ in samples], inputs, targets)

    def log_frequencies(self) -> Tensor:
        """Returns the log of how often each token occurs (plus one), shape `(NUM_TOKENS,)`."""
        counts = torch.bincount(torch.cat(self.texts).long(), minlength=NUM_TOKENS) + 1
        return (counts / counts.sum()).log()


def load_text(block: int, size: str = "small") -> tuple[SourceText, Batch]:
    """Returns the training samples, and a fixed batch of text that is never trained on."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in library.glob("*.py") if not path.is_symlink())
    held_out, training = files[::10], [path for i, path in enumerate(files) if i % 10]
    unseen = SourceText(held_out[:2], block)
    fixed = unseen.collate([unseen[i] for i in range(0, len(unseen), max(1, len(unseen) // 8))][:8])
    return SourceText(training[: 24 if size == "tiny" else 80], block), fixed
