"""The subscriber for ZeRO stage 3 refuses models that are not partitioned."""

import pytest
from torch import nn

import ort_accel
from ort_accel.subscribers import SubscriberManager, ZeROOffloadSubscriber


def test_a_model_that_is_not_partitioned_is_refused():
    with pytest.raises(ort_accel.OrtAccelError, match="ZeRO stage 3 does not partition this Linear"):
        SubscriberManager().subscribe(nn.Linear(2, 2), [ZeROOffloadSubscriber(None)])
