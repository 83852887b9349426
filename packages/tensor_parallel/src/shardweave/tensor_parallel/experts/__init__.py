"""A mixture of experts in place of one feed-forward network.

::

    x [s, b, h] -> router      which experts each token goes to, and with which weights        (router)
                -> capacity    tokens for which an expert has no room are left out, if asked    (capacity)
                -> dispatch    rows sorted by expert and sent to the ranks that have these      (dispatch)
                -> experts     a product for each expert's rows, tensor-parallel                (stacked)
                -> combine     rows come back and are added up with their weights               (dispatch)
    beside it   balance        losses and counts that keep the experts evenly used              (balance)
"""

from .balance import balance_loss, router_z_loss
from .capacity import within_capacity
from .mixture import MixtureOfExperts, Routed
from .router import Routing, TopKRouter
from .stacked import StackedLinear

__all__ = [
    "MixtureOfExperts",
    "Routed",
    "Routing",
    "StackedLinear",
    "TopKRouter",
    "balance_loss",
    "router_z_loss",
    "within_capacity",
]
