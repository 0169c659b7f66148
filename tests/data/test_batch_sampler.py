"""Batches over the load-balancing sampler: as many on every process, whatever the function makes of the samples."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ort_accel import OrtAccelError
from ort_accel.data import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

COSTS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
WORLD = st.integers(1, 5)


def by_tokens(costs, limit=100):
    """Batches of at most so many tokens, so that their number differs between processes."""

    def make(indices):
        batches, room = [], 0
        for index in indices:
            if room < costs[index]:
                batches.append([])
                room = limit
            batches[-1].append(index)
            room -= costs[index]
        return batches

    return make


def batch_samplers(costs, world, drop_last=False):
    return [
        LoadBalancingDistributedBatchSampler(
            LoadBalancingDistributedSampler(costs, float, world, rank, random_level=1.0), by_tokens(costs), drop_last
        )
        for rank in range(world)
    ]


def epoch_of(sampler, epoch):
    sampler.set_epoch(epoch)
    return list(sampler)


@settings(deadline=None)
@given(COSTS, WORLD, st.booleans(), st.integers(0, 3))
def test_all_processes_have_equally_many_batches(costs, world, drop_last, epoch):
    made = [epoch_of(sampler, epoch) for sampler in batch_samplers(costs, world, drop_last)]
    own = [by_tokens(costs)(epoch_of(sampler.sampler, epoch)) for sampler in batch_samplers(costs, world)]
    count = (min if drop_last else max)(map(len, own))
    for batches, wanted in zip(made, own, strict=True):
        assert len(batches) == count
        assert batches[: len(wanted)] == wanted[:count]
        assert all(batch in wanted for batch in batches)
    if not drop_last:
        assert {index for batches in made for batch in batches for index in batch} == set(range(len(costs)))


@settings(deadline=None)
@given(COSTS, WORLD, st.integers(0, 3), st.data())
def test_a_resumed_epoch_gives_exactly_the_batches_that_were_left(costs, world, epoch, data):
    running, resumed = batch_samplers(costs, world)[0], batch_samplers(costs, world)[0]
    running.set_epoch(epoch)
    batches = iter(running)
    for _ in range(data.draw(st.integers(0, len(running)))):
        next(batches)
    resumed.load_state_dict(running.state_dict())
    resumed.set_epoch(epoch)
    assert list(resumed) == list(batches)
    assert epoch_of(resumed, epoch + 1) == epoch_of(running, epoch + 1)


def test_the_inner_sampler_may_be_moved_to_an_epoch_too():
    first, second = batch_samplers([5, 40, 60, 30, 20, 10] * 3, 2)
    first.sampler.set_epoch(2)
    assert list(first) == epoch_of(batch_samplers([5, 40, 60, 30, 20, 10] * 3, 2)[0], 2)
    assert len(first) == len(epoch_of(second, 2))


def test_a_process_without_a_batch_is_an_error():
    sampler = LoadBalancingDistributedSampler([1, 2], float, 2, 0)
    only_dear = LoadBalancingDistributedBatchSampler(sampler, lambda indices: [[i] for i in indices if i == 1])
    with pytest.raises(OrtAccelError, match="none to repeat"):
        list(only_dear)
