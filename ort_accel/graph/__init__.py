"""Facts about ATen graphs that every room above reads.

- `nodes`: predicates and values of one node, such as its operator, its source line, and its outputs.
- `requires_grad`: marks which values of a forward graph have a gradient.
- `symbolic_sizes`: compares, prints and evaluates sizes that are known only at run time.
- `memory_layout`: tells contiguous tensors from permuted ones.
"""
