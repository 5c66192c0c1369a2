"""Answers to the exercises of chapter 19, right ones and wrong ones."""

from slips import answers

from ddp_course.chapters.ch19_failures import solutions

ANSWERS = answers(solutions, globals())
