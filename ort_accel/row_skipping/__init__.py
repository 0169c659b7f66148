"""Leaves out rows that change nothing: padding, ignored labels, and tokens that a selection drops.

A row is one token in most places. The analysis is a backward data-flow analysis over the forward graph:

1. `pipeline` is the entry: it takes a captured graph and returns a `Proposal`, or raises `NothingToSkip`.
2. `mutation` replaces in-place operators first, so that the analysis sees new tensors.
3. `row_demand` walks the graph backward and hands on which rows of each value are read, as defined in `row_sets`.
4. `arithmetic_rules` and `layout_rules` tell it how rows pass through one operator.
5. `attention_match`, `unfused_attention`, `moe`, `ignored_labels` and `selections` match patterns.
6. `row_plan` turns the result into a few numbered row sets, and gives each value its set.
7. `input_graph` writes the graph of labels and masks; `batch_row_tables` runs it for each batch and returns tables.
8. `packed_graph_writer` writes the smaller graph, which takes the tables and computes each value as packed rows.

The compiler calls the proposal for every batch, and runs the smaller graph or the whole one.
"""
