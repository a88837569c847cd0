"""The sample orders of the frameworks, and one of our own, each as a `GlobalOrder` with random access.

Every order here answers one question: these samples are committed, what remains, in which order? A framework's order
is defined for the number of ranks under which it was written, and then dealt to any other (`docs/order.md`).
"""

from samerun.core.orders.accelerate import AccelerateOrder
from samerun.core.orders.distributed import DistributedSamplerOrder, RandomSamplerOrder
from samerun.core.orders.keyed import KeyedOrder
from samerun.core.orders.megatron import MegatronCyclicOrder, MegatronSequentialOrder
from samerun.core.orders.read import ORDER_FORMS, order_from_identity, parse_order
from samerun.core.orders.remainder import RemainderOrder, Switch, compare_switch
from samerun.core.orders.shards import RangeOrder, ShardCursor, ShardRange, remaining_ranges
from samerun.core.orders.spec import order_from_spec, order_spec
from samerun.core.orders.stateful import batches_given, stateful_position

__all__ = [
    "ORDER_FORMS",
    "AccelerateOrder",
    "DistributedSamplerOrder",
    "KeyedOrder",
    "MegatronCyclicOrder",
    "MegatronSequentialOrder",
    "RandomSamplerOrder",
    "RangeOrder",
    "RemainderOrder",
    "ShardCursor",
    "ShardRange",
    "Switch",
    "batches_given",
    "compare_switch",
    "order_from_identity",
    "order_from_spec",
    "order_spec",
    "parse_order",
    "remaining_ranges",
    "stateful_position",
]
