"""Keys of `fx.Node.meta` by which rooms pass facts about a node to each other."""

FROM_DATA = "from data"
"""The node's value is a number that follows from the content of a tensor."""

HAS_GRADIENT = "has_gradient"
"""True if the node's value requires a gradient; fake tensors of a traced graph do not tell."""

RUNS_AFTER = "behind"
"""Names of the nodes that must run in an earlier segment than this recomputed node."""

OUTLIVES_GRAPH = "lasts"
"""The graph input occupies memory whether any node reads it or not, as parameters do."""

CAST_OF = "cast of"
"""The graph input holds the cast of the weight that is the input of this name."""

RECOMPUTE = "recompute"
"""PyTorch's key: the `CheckpointPolicy` of an operator within an activation checkpoint."""

CHECKPOINT_REGION = "ac_graph_id"
"""PyTorch's key: the number of the activation checkpoint that an operator is in."""

PARTITIONER_TAG = "partitioner_tag"
"""PyTorch's key: `is_forward` or `is_backward`, the half of a joint graph that a node belongs to."""
