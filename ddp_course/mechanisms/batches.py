"""The former name of a part of `mechanisms.agreement`."""

from ddp_course.mechanisms.agreement import described as told
from ddp_course.mechanisms.agreement import digest, kind_of

__all__ = ["digest", "kind_of", "told"]
