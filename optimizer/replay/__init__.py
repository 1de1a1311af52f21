"""Replay: what a policy would do on recorded texts, exactly, and how long that would take.

In: a recording with its panoramas, a policy, a latency profile. Out: an ``Outcome`` of one request
at a time (:mod:`optimizer.replay.fast_replay`), or a ``Simulated`` load of requests that an engine
serves many at once (:mod:`optimizer.replay.serving`).
"""
