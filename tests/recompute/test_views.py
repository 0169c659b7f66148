"""The backward recomputes views from their sources, so that no view is saved."""

import torch
from functorch.compile import aot_function, default_partition, make_boxed_func

from ort_accel.graph.nodes import is_view
from ort_accel.recompute.split_joint_graph import split_joint_graph


def kept(function, inputs, partition_fn):
    """Return the nodes that the forward saves for the backward, and the gradients."""
    found = []

    def divide(joint, joint_inputs, *, num_fwd_outputs, **more):
        forward, backward = partition_fn(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **more)
        found.extend(list(forward.graph.output_node().args[0])[num_fwd_outputs:])
        return forward, backward

    def run(module, _):
        return make_boxed_func(module.forward)

    leaves = [x.clone().requires_grad_() for x in inputs]
    aot_function(function, fw_compiler=run, bw_compiler=run, partition_fn=divide)(*leaves).sum().backward()
    return found, [leaf.grad for leaf in leaves]


def attention(x, w):
    heads = (x @ w).view(2, 5, 2, 4).transpose(1, 2)
    return (heads @ heads.transpose(-1, -2)).softmax(-1).transpose(1, 2).reshape(2, 5, 10).sin()


def test_no_view_of_a_whole_value_is_saved():
    inputs = [torch.randn(2, 5, 8), torch.randn(8, 8)]
    before, expected = kept(attention, inputs, default_partition)
    after, got = kept(attention, inputs, split_joint_graph)
    assert any(is_view(node) for node in before)
    assert not any(is_view(node) for node in after)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_the_source_of_several_views_is_saved_once():
    def twice(x):
        y = x.exp()
        return y.view(6).sin().sum() + y.t().cos().sum()

    after, _ = kept(twice, [torch.randn(2, 3)], split_joint_graph)
    assert len([node for node in after if isinstance(node.meta.get("val"), torch.Tensor)]) == 1


def test_a_selection_is_saved_rather_than_its_source():
    def first_token(x):
        return x.cos()[:, 0].exp().sin()

    after, _ = kept(first_token, [torch.randn(4, 128, 8)], split_joint_graph)
    computed = [node for node in after if node.op != "placeholder"]
    assert all(node.meta["val"].numel() == 4 * 8 for node in computed)
