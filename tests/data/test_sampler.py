"""The load-balancing sampler: every sample once, equal shares, the same deal everywhere, and less waiting."""

import json
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ort_accel import OrtAccelError
from ort_accel.data import LoadBalancingDistributedSampler, balance_of

COSTS = st.lists(st.integers(1, 500), min_size=1, max_size=60)
RULES = st.fixed_dictionaries(
    {
        "shuffle": st.booleans(),
        "group_size": st.one_of(st.none(), st.integers(1, 40)),
        "seed": st.integers(0, 5),
        "drop_last": st.booleans(),
        "random_level": st.sampled_from([0.0, 0.3, 1.0]),
    }
)
WORLD = st.integers(1, 7)
EPOCH = st.integers(0, 4)


def samplers(costs, world, **rules):
    return [LoadBalancingDistributedSampler(costs, float, world, rank, **rules) for rank in range(world)]


def epoch_of(sampler, epoch):
    sampler.set_epoch(epoch)
    return list(sampler)


def lognormal(count):
    return torch.empty(count).log_normal_(4, 0.8, generator=torch.Generator().manual_seed(1)).ceil().tolist()


@settings(deadline=None)
@given(COSTS, WORLD, RULES, EPOCH)
def test_no_sample_is_left_out_or_repeated_more_than_needed(costs, world, rules, epoch):
    shares = [epoch_of(sampler, epoch) for sampler in samplers(costs, world, **rules)]
    given_out = Counter(index for share in shares for index in share)
    whole, rest = divmod(len(costs), world)
    rounds = whole if rules["drop_last"] or not rest else whole + 1
    assert [len(share) for share in shares] == [rounds] * world
    if rules["drop_last"]:
        assert set(given_out.values()) <= {1}
        assert len(given_out) == len(costs) - rest
    else:
        assert len(given_out) == len(costs)
        assert max(given_out.values()) - min(given_out.values()) <= 1


@settings(deadline=None)
@given(COSTS, WORLD, RULES, EPOCH)
def test_seed_and_epoch_decide_everything(costs, world, rules, epoch):
    first, second = samplers(costs, world, **rules)[0], samplers(costs, world, **rules)[0]
    epoch_of(second, epoch + 1)
    assert epoch_of(first, epoch) == epoch_of(second, epoch)
    assert len(first) == len(epoch_of(first, epoch))


@settings(deadline=None)
@given(COSTS, WORLD, RULES, EPOCH, st.data())
def test_a_resumed_epoch_gives_exactly_what_was_left(costs, world, rules, epoch, data):
    running, resumed = samplers(costs, world, **rules)[0], samplers(costs, world, **rules)[0]
    running.set_epoch(epoch)
    samples = iter(running)
    seen = data.draw(st.integers(0, len(running)))
    for _ in range(seen):
        next(samples)
    resumed.load_state_dict(json.loads(json.dumps(running.state_dict())))
    resumed.set_epoch(epoch)  # as a training loop does
    assert list(resumed) == list(samples)
    assert epoch_of(resumed, epoch + 1) == epoch_of(running, epoch + 1)


@settings(deadline=None)
@given(COSTS, WORLD, st.integers(0, 3))
def test_the_samples_of_a_round_are_neighbours_in_cost(costs, world, epoch):
    shares = [epoch_of(sampler, epoch) for sampler in samplers(costs, world, drop_last=True)]
    turns = sorted(sorted(costs[index] for index in turn) for turn in zip(*shares, strict=True))
    flat = [cost for turn in turns for cost in turn]
    assert flat == sorted(flat)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_spread_of_load_is_a_tenth_of_the_distributed_samplers(world, batch, shuffle):
    sampler = samplers(lognormal(4000), world, shuffle=shuffle)[0]
    before, after = balance_of(sampler, batch)
    assert after.spread < before.spread / 10
    assert after.waiting < before.waiting / 10


def test_no_process_is_always_the_slowest():
    sampler = samplers(lognormal(4000), 4)[0]
    totals = torch.tensor([sum(sampler.costs[i] for i in sampler.of_rank(rank)) for rank in range(4)])
    assert totals.max() / totals.min() < 1.01


def test_groups_and_noise_are_more_random_and_still_balance():
    costs = lognormal(4000)
    spreads = [
        balance_of(samplers(costs, 4, **rules)[0], 8)[1].spread
        for rules in ({}, {"group_size": 400}, {"random_level": 0.1}, {"random_level": 1.0})
    ]
    assert spreads == sorted(spreads)
    assert spreads[1] < balance_of(samplers(costs, 4)[0], 8)[0].spread / 4


def test_epochs_differ_and_so_do_seeds():
    costs = lognormal(200)
    sampler = samplers(costs, 2)[0]
    orders = [epoch_of(sampler, 0), epoch_of(sampler, 1), epoch_of(samplers(costs, 2, seed=1)[0], 0)]
    assert len({tuple(order) for order in orders}) == 3


def test_without_shuffling_work_grows():
    costs = lognormal(100)
    shares = [[costs[i] for i in sampler] for sampler in samplers(costs, 2, shuffle=False)]
    assert [max(turn) for turn in zip(*shares, strict=True)] == sorted(max(turn) for turn in zip(*shares, strict=True))


def test_each_cost_is_computed_once():
    asked = []
    sampler = LoadBalancingDistributedSampler("abcdef", lambda sample: asked.append(sample) or 1, 2, 0)
    for epoch in range(3):
        epoch_of(sampler, epoch)
    assert asked == list("abcdef")


def test_iterating_again_without_a_new_epoch_gives_the_same():
    sampler = samplers([3, 1, 2, 5], 2)[0]
    assert list(sampler) == list(sampler)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"world_size": 0, "rank": 0}, "world_size is 0"),
        ({"rank": 2}, "rank is 2; .* between 0 and 1"),
        ({"group_size": 0}, "group_size is 0"),
        ({"random_level": 1.5}, "random_level is 1.5"),
        ({"complexity_fn": lambda _: float("nan")}, "gave nan for sample 0"),
        ({"rank": None}, "torch.distributed is not set up"),
    ],
)
def test_invalid_sampler_settings_are_errors(change, said):
    arguments = {"dataset": [1, 2], "complexity_fn": float, "world_size": 2, "rank": 0}
    with pytest.raises(OrtAccelError, match=said):
        LoadBalancingDistributedSampler(**{**arguments, **change})


@pytest.mark.parametrize("other", [{"seed": 1}, {"drop_last": True}, {"world": 3}, {"costs": [1, 2, 3, 4, 6]}])
def test_the_state_of_another_sampler_is_refused(other):
    state = samplers([1, 2, 3, 4, 5], 2)[0].state_dict()
    arguments = {"costs": [1, 2, 3, 4, 5], "world": 2, **other}
    with pytest.raises(OrtAccelError, match="another deal"):
        samplers(**arguments)[0].load_state_dict(state)


def test_a_dict_that_is_no_state_is_refused():
    with pytest.raises(OrtAccelError, match=r"lacks .*world_size"):
        samplers([1, 2], 2)[0].load_state_dict({"epoch": 0, "done": 1})
