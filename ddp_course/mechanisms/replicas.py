"""The former name of `mechanisms.agreement`."""

from ddp_course.mechanisms.agreement import *  # noqa: F403
