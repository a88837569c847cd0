"""What every section of a manifest shares."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """What every section shares: frozen, exact about types, and no key that is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)
