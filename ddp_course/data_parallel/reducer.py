"""The former name of `mechanisms.engine`."""

from ddp_course.mechanisms.engine import Engine as Reducer

__all__ = ["Reducer"]
