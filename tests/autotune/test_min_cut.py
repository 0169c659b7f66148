"""The division that is found costs least."""

import math
import random
from itertools import product

import pytest

from ort_accel.autotune.min_cut import Costs, cheapest


def total(costs, readers, price, in_pytorch):
    """Returns the cost of a division by its definition."""
    own = sum(cost.pytorch if node in in_pytorch else cost.ort for node, cost in costs.items())
    handed_over = [
        node for node in readers if any((other in in_pytorch) != (node in in_pytorch) for other in readers[node])
    ]
    return own + price * len(handed_over)


@pytest.mark.parametrize("seed", range(40))
def test_it_equals_the_best_of_all_divisions(seed):
    generator = random.Random(seed)
    count = generator.randint(1, 8)
    costs, readers = {}, {}
    for node in range(count):
        side = generator.random()
        ort = math.inf if side < 0.2 else generator.random()
        costs[node] = Costs(ort, math.inf if side > 0.8 else generator.random())
        readers[node] = [other for other in range(node + 1, count) if generator.random() < 0.4]
    price = generator.choice([0.0, 0.1, 0.5, 10.0])
    all_divisions = [
        {node for node, chosen in enumerate(choice) if chosen} for choice in product([False, True], repeat=count)
    ]
    best = min(total(costs, readers, price, division) for division in all_divisions)
    assert total(costs, readers, price, cheapest(costs, readers, price)) == pytest.approx(best)


def chain(*costs):
    return dict(enumerate(costs)), {node: [node + 1] for node in range(len(costs) - 1)}


def test_a_faster_kernel_is_left_alone_when_getting_there_costs_more():
    costs, readers = chain(Costs(1.0, 9.0), Costs(2.0, 1.5), Costs(1.0, 9.0))
    assert cheapest(costs, readers, price=0.3) == set()
    assert cheapest(costs, readers, price=0.2) == {1}


def test_results_that_many_read_are_handed_over_once():
    costs = {0: Costs(1.0, 9.0), **{node: Costs(1.2, 1.0) for node in range(1, 6)}}
    readers = {0: [1, 2, 3, 4, 5]}
    assert cheapest(costs, readers, price=0.9) == {1, 2, 3, 4, 5}


def test_long_graphs_are_divided_too():
    costs, readers = chain(*[Costs(1.0, 2.0) if number // 10 % 2 else Costs(2.0, 1.0) for number in range(2000)])
    division = cheapest(costs, readers, price=0.5)
    assert division == {number for number in range(2000) if number // 10 % 2 == 0}
