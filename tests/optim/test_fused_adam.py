"""FusedAdam follows the definition of each mode, and PyTorch's AdamW to the bit where that has the same rule."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.common_optimizers import optim_db

from ort_accel.errors import OptimizerError, OrtAccelError
from ort_accel.optim import AdamWMode, FusedAdam
from tests.optim.reference import reference_adam

MODES = list(AdamWMode)
HYPER = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-5, "weight_decay": 0.1}
ADAMW = next(info for info in optim_db if info.optim_cls is torch.optim.AdamW)


def parameters(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradients(params, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(p.shape, generator=generator).to(p.dtype) for p in params] for _ in range(steps)]


def train(optimizer, params, grads):
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone() if grad is not None else None
        optimizer.step()


def clones(params):
    return [nn.Parameter(param.detach().clone()) for param in params]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("bias_correction", "dtype"), [(True, torch.float64), (True, torch.float32), (False, torch.float64)]
)
def test_a_thousand_steps_follow_the_definition(mode, bias_correction, dtype):
    params = parameters((7, 5), (), dtype=dtype)
    start, grads = clones(params), gradients(params, 1000)
    train(FusedAdam(params, adam_w_mode=mode, bias_correction=bias_correction, **HYPER), params, grads)
    for index, param in enumerate(params):
        wanted = reference_adam(
            [g[index] for g in grads], start[index].detach(), mode, bias_correction=bias_correction, **HYPER
        )
        exact = dtype == torch.float64
        torch.testing.assert_close(param.double(), wanted, rtol=1e-10 if exact else 1e-4, atol=1e-10 if exact else 1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_the_modes_differ(mode):
    params = parameters((50,))
    others = {other: clones(params) for other in MODES if other != mode}
    grads, hyper = gradients(params, 20), {**HYPER, "eps": 0.1}
    train(FusedAdam(params, adam_w_mode=mode, **hyper), params, grads)
    for other, its_params in others.items():
        train(FusedAdam(its_params, adam_w_mode=other, **hyper), its_params, grads)
        assert (params[0] - its_params[0]).abs().max() > 1e-4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}], ids=str)
@pytest.mark.parametrize(("mode", "peer"), [(0, torch.optim.Adam), (2, torch.optim.AdamW)])
def test_equals_pytorchs_fused_path_to_the_bit(mode, peer, options, dtype):
    params = parameters((9, 7), (41,), dtype=dtype)
    theirs, grads = clones(params), gradients(params, 50)
    train(FusedAdam(params, adam_w_mode=mode, **HYPER, **options), params, grads)
    train(peer(theirs, fused=True, **HYPER, **options), theirs, grads)
    for mine, other in zip(params, theirs, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}], ids=str)
@pytest.mark.parametrize("capturable", [False, True])
def test_options_of_pytorch_hold_in_the_mode_that_pytorch_lacks(options, capturable):
    params = parameters((9, 7), dtype=torch.float64)
    start, grads = clones(params), gradients(params, 60)
    train(FusedAdam(params, adam_w_mode=1, capturable=capturable, **HYPER, **options), params, grads)
    sign = -1 if options.get("maximize") else 1
    wanted = reference_adam(
        [sign * g[0] for g in grads], start[0].detach(), 1, amsgrad=options.get("amsgrad", False), **HYPER
    )
    # On the device the step size is kept in fp32.
    tolerance = 1e-6 if capturable else 1e-12
    torch.testing.assert_close(params[0].detach(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("lr", "weight_decay"), [(0.5, 2.0), (0.5, 3.0), (0.0, 0.1), (1e-3, 0.0)])
def test_any_decay_from_zero_to_more_than_one_follows_the_definition(lr, weight_decay):
    hyper = {**HYPER, "lr": lr, "weight_decay": weight_decay}
    params = parameters((20,), dtype=torch.float64)
    start, grads = clones(params), gradients(params, 10)
    train(FusedAdam(params, adam_w_mode=1, **hyper), params, grads)
    wanted = reference_adam([g[0] for g in grads], start[0].detach(), 1, **hyper)
    torch.testing.assert_close(params[0].detach(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_that_joins_late_counts_its_own_steps(mode):
    params = parameters((6,), (6,), dtype=torch.float64)
    start, grads = clones(params), gradients(params, 12)
    late = [[first, second if step >= 5 else None] for step, (first, second) in enumerate(grads)]
    train(FusedAdam(params, adam_w_mode=mode, **HYPER), params, late)
    for index, begin in ((0, 0), (1, 5)):
        wanted = reference_adam([g[index] for g in grads[begin:]], start[index].detach(), mode, **HYPER)
        torch.testing.assert_close(params[index].detach(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_types_in_one_list_are_updated_as_if_alone(mode):
    mixed = [p for dtype in (torch.float32, torch.bfloat16, torch.float64) for p in parameters((5, 3), dtype=dtype)]
    alone, grads = clones(mixed), gradients(mixed, 10)
    train(FusedAdam(mixed, adam_w_mode=mode, **HYPER), mixed, grads)
    for index, param in enumerate(alone):
        train(FusedAdam([param], adam_w_mode=mode, **HYPER), [param], [[g[index]] for g in grads])
        assert torch.equal(param, mixed[index])


def memory_layouts():
    whole = torch.randn(6, 16)
    return {
        "transposed parameter": (torch.randn(8, 6).t(), torch.randn(6, 8)),
        "transposed gradient": (torch.randn(6, 8), torch.randn(8, 6).t()),
        "every second column": (whole[:, ::2], torch.randn(6, 8)),
        "expanded gradient": (torch.randn(6, 8), torch.randn(1, 8).expand(6, 8)),
        "channels last": (
            torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            torch.randn(2, 3, 4, 5),
        ),
    }


@pytest.mark.parametrize("layout", memory_layouts())
@pytest.mark.parametrize("mode", MODES)
def test_memory_layouts_make_no_difference(mode, layout):
    param, grad = memory_layouts()[layout]
    param = param.detach().requires_grad_()
    plain = nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format))
    for each in (param, plain):
        optimizer = FusedAdam([each], adam_w_mode=mode, **HYPER)
        for _ in range(3):
            each.grad = grad.clone() if each is plain else grad
            optimizer.step()
    assert torch.equal(param, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", MODES)
def test_moments_in_fp32_on_request(mode, dtype):
    params = parameters((9, 7), dtype=dtype)
    start, grads = clones(params), gradients(params, 1)
    optimizer = FusedAdam(params, adam_w_mode=mode, fp32_state=True, **HYPER)
    train(optimizer, params, grads)
    state = optimizer.state[params[0]]
    assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.float32}
    wanted = reference_adam([grads[0][0]], start[0].detach(), mode, **HYPER)
    assert torch.equal(params[0].detach(), wanted.float().to(dtype))


def test_a_large_parameter_is_converted_in_parts(monkeypatch):
    from ort_accel.optim import adam_update

    params = parameters((9, 7), (30,), (5, 5), dtype=torch.bfloat16)
    whole, grads = clones(params), gradients(params, 5)
    train(FusedAdam(whole, fp32_state=True, **HYPER), whole, grads)
    monkeypatch.setattr(adam_update, "_MAX_COPIED_ELEMENTS", 40)
    train(FusedAdam(params, fp32_state=True, **HYPER), params, grads)
    assert all(torch.equal(a, b) for a, b in zip(params, whole, strict=True))


def test_groups_have_their_own_options():
    params = parameters((6,), (6,), (6,), dtype=torch.float64)
    start, grads = clones(params), gradients(params, 10)
    own = [{"adam_w_mode": 0, "lr": 1e-2}, {"adam_w_mode": 1, "betas": (0.8, 0.9)}, {"adam_w_mode": 2, "eps": 1e-3}]
    optimizer = FusedAdam([{"params": [p], **options} for p, options in zip(params, own, strict=True)], **HYPER)
    train(optimizer, params, grads)
    for index, options in enumerate(own):
        hyper = {**HYPER, **options}
        mode = hyper.pop("adam_w_mode")
        wanted = reference_adam([g[index] for g in grads], start[index].detach(), mode, **hyper)
        torch.testing.assert_close(params[index].detach(), wanted, rtol=1e-12, atol=1e-12)


def test_a_closure_is_run_with_gradients_and_its_loss_returned():
    (param,) = parameters((4,))
    before = param.detach().clone()
    optimizer = FusedAdam([param])

    def closure():
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx((before**2).sum().item())
    assert not torch.equal(param, before)


def test_sparse_gradients_are_refused_with_advice():
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(OrtAccelError, match=r"sparse gradient for a parameter of shape \(5, 3\).*sparse=False"):
        FusedAdam(embedding.parameters()).step()


def test_gradients_are_dropped_unless_asked_otherwise():
    for options, dropped in (({}, True), ({"set_grad_none": False}, False)):
        optimizer = copy.deepcopy(FusedAdam(parameters((4,)), **options))
        (param,) = optimizer.param_groups[0]["params"]
        param.grad = torch.ones(4)
        optimizer.zero_grad()
        assert param.grad is None if dropped else torch.equal(param.grad, torch.zeros(4))


# ---- states


@pytest.mark.parametrize("fused", [True, False])
def test_states_go_to_adamw_and_back(fused):
    params = parameters((9, 7), (3,), dtype=torch.float64)
    grads = gradients(params, 30)
    uninterrupted = clones(params)
    train(torch.optim.AdamW(uninterrupted, fused=fused, **HYPER), uninterrupted, grads)
    optimizer = torch.optim.AdamW(params, fused=fused, **HYPER)
    train(optimizer, params, grads[:10])
    ours = FusedAdam(params, adam_w_mode=2, lr=1.0)
    ours.load_state_dict(optimizer.state_dict())
    train(ours, params, grads[10:20])
    optimizer = torch.optim.AdamW(params)
    optimizer.load_state_dict(ours.state_dict())
    train(optimizer, params, grads[20:])
    for param, wanted in zip(params, uninterrupted, strict=True):
        torch.testing.assert_close(param, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["state_dict", "pickle"])
def test_a_resumed_run_equals_an_uninterrupted_one(mode, dtype, way):
    params = parameters((9, 7), (3,), dtype=dtype)
    uninterrupted, grads = clones(params), gradients(params, 20)
    options = {"adam_w_mode": mode, "fp32_state": True, **HYPER}
    train(FusedAdam(uninterrupted, **options), uninterrupted, grads)
    first = FusedAdam(params, **options)
    train(first, params, grads[:9])
    if way == "pickle":
        second = pickle.loads(pickle.dumps(first))
        params = second.param_groups[0]["params"]
    else:
        second = FusedAdam(params, **options)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, params, grads[9:])
    assert all(torch.equal(a, b) for a, b in zip(params, uninterrupted, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_onnxruntime_trainings_layout_loads(mode):
    """There the group counts the steps, and a parameter's state has the moments only."""
    params = parameters((9, 7), dtype=torch.float64)
    uninterrupted, grads = clones(params), gradients(params, 20)
    train(FusedAdam(uninterrupted, adam_w_mode=mode, **HYPER), uninterrupted, grads)
    first = FusedAdam(params, adam_w_mode=mode, **HYPER)
    train(first, params, grads[:9])
    moments = {name: first.state[params[0]][name].clone() for name in ("exp_avg", "exp_avg_sq")}
    theirs = {
        "state": {0: moments},
        "param_groups": [{**HYPER, "bias_correction": True, "step": 9, "params": [0]}],
    }
    second = FusedAdam(params, adam_w_mode=mode)
    second.load_state_dict(theirs)
    train(second, params, grads[9:])
    assert torch.equal(params[0], uninterrupted[0])
    assert "step" not in second.param_groups[0]


def test_a_state_with_other_strides_loads():
    (param,) = parameters((6, 8))
    twin = nn.Parameter(param.detach().t().clone().t())
    grads = gradients([param], 6)
    first = FusedAdam([param], adam_w_mode=2, **HYPER)
    train(first, [param], grads[:3])
    second = FusedAdam([twin], adam_w_mode=2, **HYPER)
    with torch.no_grad():
        twin.copy_(param)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(first, [param], grads[3:])
    train(second, [twin], grads[3:])
    assert torch.equal(param, twin)


# ---- GradScaler's protocol


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_a_grad_scaler_unscales_and_skips_through_the_optimizer(mode, capturable, bias_correction):
    params = parameters((9, 7), (3,))
    plain, grads = clones(params), gradients(params, 8)
    options = {"adam_w_mode": mode, "capturable": capturable, "bias_correction": bias_correction, **HYPER}
    optimizer = FusedAdam(params, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    scaler.scale(torch.zeros(()))
    for number, step in enumerate(grads):
        before = clones(params)
        for param, grad in zip(params, step, strict=True):
            param.grad = scaler.scale(grad)
        overflow = number in (0, 4)
        if overflow:
            params[1].grad[2] = float("nan")
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True)) == overflow
    assert scaler.get_scale() == 32.0
    train(FusedAdam(plain, **options), plain, [grads[number] for number in range(8) if number not in (0, 4)])
    for param, wanted in zip(params, plain, strict=True):
        torch.testing.assert_close(param, wanted, rtol=1e-6, atol=1e-7)


# ---- torch's own database of optimizer inputs


def applies(options):
    """PyTorch's choices of an implementation have no counterpart: FusedAdam has one."""
    return not {"foreach", "fused", "differentiable"} & set(options)


def wrong_inputs():
    for each in ADAMW.optim_error_inputs_func("cpu", torch.float32):
        if applies(each.optimizer_error_input.kwargs):
            yield pytest.param(each, id=each.optimizer_error_input.desc)


@pytest.mark.parametrize("each", list(wrong_inputs()))
def test_wrong_inputs_are_errors_as_in_pytorch(each):
    given = each.optimizer_error_input
    params = given.params if given.params is not None else parameters((1, 1))
    if each.error_type is UserWarning:
        with pytest.warns(UserWarning, match=each.error_regex):
            FusedAdam(params, **given.kwargs)
    else:
        with pytest.raises(each.error_type, match=each.error_regex):
            FusedAdam(params, **given.kwargs)


def option_grid():
    """AdamW's options of PyTorch's database; those of CUDA's list that a CPU can run too."""
    for device in ("cpu", "cuda"):
        for each in ADAMW.optim_inputs_func(device=device):
            yield pytest.param(each.kwargs, id=f"{device}: {each.desc}")


@pytest.mark.parametrize("options", list(option_grid()))
def test_the_option_grid_of_pytorch_matches_its_loop(options):
    params = parameters((10, 5), (5,), dtype=torch.float64)
    theirs, grads = clones(params), gradients(params, 7)
    train(FusedAdam(params, **{"eps": 1e-8, "weight_decay": 1e-2, **options, "adam_w_mode": 2}), params, grads)
    plain = {key: value for key, value in options.items() if key != "capturable"}
    if "betas" in plain:
        plain["betas"] = tuple(beta.item() for beta in plain["betas"])
    if "lr" in plain:
        plain["lr"] = float(plain["lr"])
    train(torch.optim.AdamW(theirs, foreach=False, **plain), theirs, grads)
    for mine, other in zip(params, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-7, atol=1e-7)


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    lr=st.floats(1e-6, 0.5),
    beta1=st.floats(0.0, 0.99),
    beta2=st.floats(0.0, 0.9999),
    eps=st.floats(1e-10, 1e-2),
    weight_decay=st.floats(0.0, 2.0),
    bias_correction=st.booleans(),
    steps=st.integers(1, 8),
)
def test_any_hyperparameters_follow_the_definition(mode, lr, beta1, beta2, eps, weight_decay, bias_correction, steps):
    hyper = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
    params = parameters((11,), dtype=torch.float64)
    start, grads = clones(params), gradients(params, steps)
    train(FusedAdam(params, adam_w_mode=mode, bias_correction=bias_correction, **hyper), params, grads)
    wanted = reference_adam([g[0] for g in grads], start[0].detach(), mode, bias_correction=bias_correction, **hyper)
    torch.testing.assert_close(params[0].detach(), wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.complex64])
def test_parameters_that_no_kernel_takes_are_refused(dtype):
    with pytest.raises(OptimizerError, match=r"cannot update a parameter of torch\.complex64"):
        FusedAdam([nn.Parameter(torch.zeros(3, dtype=dtype))])


def test_a_group_with_a_wrong_option_is_not_added():
    optimizer = FusedAdam(parameters((3,)))
    with pytest.raises(OptimizerError, match=r"Invalid adam_w_mode: 7; it is one of 0 \(ADAM_L2_REGULARIZATION\)"):
        optimizer.add_param_group({"params": parameters((2,)), "adam_w_mode": 7})
    assert len(optimizer.param_groups) == 1


def test_a_hook_that_changes_a_state_before_it_is_loaded_is_obeyed():
    def stepped():
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = FusedAdam([weight], lr=0.1)
        weight.grad = torch.tensor([1.0, 2.0, 3.0])
        optimizer.step()
        return weight, optimizer

    def unwrapped(_, given):
        inner = given["inside"]
        moments = {name: value * 2 if name == "exp_avg" else value for name, value in inner["state"][0].items()}
        return {**inner, "state": {0: moments}}

    _, saved = stepped()
    weight, optimizer = stepped()
    optimizer.register_load_state_dict_pre_hook(unwrapped)
    optimizer.load_state_dict({"inside": saved.state_dict()})
    assert torch.equal(optimizer.state[weight]["exp_avg"], 2 * saved.state_dict()["state"][0]["exp_avg"])
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1
