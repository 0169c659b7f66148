"""Private attributes of DeepSpeed's classes are found by their mangled names."""

from ort_accel.zero3.deepspeed_interfaces import mangled, missing_private


def test_private_attributes_are_found_in_subclasses():
    class Base:
        def __init__(self):
            self.__limit = 1

        def __share(self):
            raise NotImplementedError

    class Special(Base):
        pass

    assert missing_private(Special(), ["limit", "share", "other"]) == ["Special.__other"]
    assert getattr(Special(), mangled(Special(), "limit")) == 1
