"""The batch equation: every honest way to deal one global batch to a number of batch replicas.

`replicas x microbatch x passes = global batch` has a whole solution at the old degree and often none at the new one:
16 replicas x 2 x 8 passes are 256 samples, and 10 replicas x 2 would need 12.8 passes. What can be done about it is a
closed list, and none of it is chosen here:

* `uniform`: the replicas divide the batch and every microbatch has the same size.
* `ragged`: every replica makes the same number of passes (collectives must match) with microbatches of different
  sizes. The same samples count in the same update, so it is exact, provided that the loss is normalised by the whole
  update's contributions and not by each microbatch's own.
* `fewer-replicas`: uniform on fewer replicas; the rest stay idle.
* `changed-batch`: another global batch that *is* dealt uniformly. Another training run, which needs a policy for the
  learning rate and is labelled an intentional change.

Counts are samples per update unless said otherwise; replicas are *batch* replicas (`Layout.batch_replicas`), never
ranks: tensor-, context- and pipeline-parallel ranks of one replica share its samples.
"""

from samerun.core.batch.cost import OptionCost, cost_of
from samerun.core.batch.dealing import MAX_CELLS, Dealing, deal
from samerun.core.batch.option import (
    EMPTY_MICROBATCHES,
    IDLE_REPLICAS,
    LEARNING_RATE_POLICY,
    MEASURED_TOKENS,
    WEIGHTED_NORMALISATION,
    BatchOption,
    Kind,
    LearningRateChoice,
    Policy,
    Unit,
    learning_rate_factor,
)
from samerun.core.batch.plan import check_batch, plan_batch
from samerun.core.batch.ramp import RampUp, check_ramp
from samerun.core.batch.source import SourceBatch
from samerun.core.batch.tokens import TokenDealing, deal_tokens

__all__ = [
    "EMPTY_MICROBATCHES",
    "IDLE_REPLICAS",
    "LEARNING_RATE_POLICY",
    "MAX_CELLS",
    "MEASURED_TOKENS",
    "WEIGHTED_NORMALISATION",
    "BatchOption",
    "Dealing",
    "Kind",
    "LearningRateChoice",
    "OptionCost",
    "Policy",
    "RampUp",
    "SourceBatch",
    "TokenDealing",
    "Unit",
    "check_batch",
    "check_ramp",
    "cost_of",
    "deal",
    "deal_tokens",
    "learning_rate_factor",
    "plan_batch",
]
