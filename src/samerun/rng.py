"""Random numbers that belong to a sample, whichever rank draws them. Needs no torch; see `samerun.core.rng`.

from samerun import rng

class Images(Dataset):
    def __getitem__(self, index):
        draw = rng.generator(seed=0, epoch=self.epoch, sample=index, operation="crop")
        x = draw.integers(0, 32)
"""

from samerun.core.rng import StreamKey, generator, philox, uniforms, words

__all__ = ["StreamKey", "generator", "philox", "uniforms", "words"]
