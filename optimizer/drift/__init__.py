"""Drift: whether a deployment's traffic is still what it was when its policy came into force.

In: the rounds that were stored since. Out: alarms, which say what a tuning would gain, and whether
one was made due. ``docs/schedules.md`` says what is promised.
"""
