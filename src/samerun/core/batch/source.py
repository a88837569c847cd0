"""The batch equation of the run that is being moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from samerun.errors import Problem, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceBatch:
    """The batch equation of the run that is being moved: `replicas x micro x accum` samples per update."""

    replicas: int
    micro: int
    accum: int

    @property
    def global_batch(self) -> int:
        """The product."""
        return self.replicas * self.micro * self.accum

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `"replicas=16,micro=2,accum=8"`.

        Raises:
            UsageError: naming everything in the text that is missing, unknown, repeated or no count (SR-BATCH-FROM).
        """
        names, values, wrong = ("replicas", "micro", "accum"), dict[str, int](), list[str]()
        for part in text.replace(" ", "").split(","):
            name, _, number = part.partition("=")
            if name not in names:
                wrong.append(f"{part!r} is none of {', '.join(names)}")
            elif name in values:
                wrong.append(f"{name} is given twice")
            elif not (number.isascii() and number.isdigit() and int(number)):
                wrong.append(f"{name} must be a whole number of at least 1, not {number!r}")
                values[name] = 1
            else:
                values[name] = int(number)
        wrong += [f"{name} is missing" for name in names if name not in values]
        if wrong:
            hint = "it looks like replicas=16,micro=2,accum=8"
            raise UsageError([Problem("SR-BATCH-FROM", f"--from: {each}", hint=hint) for each in wrong])
        return cls(**values)
