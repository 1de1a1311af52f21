"""Imagines what a policy would do, then proves it.

In: recordings and latency profiles of the database. Out: policies, with the evidence for them.
Recorded in :mod:`optimizer.recording`, replayed in :mod:`optimizer.replay`, fitted in
:mod:`optimizer.fit`, tuned in :mod:`optimizer.tuning`, shown by :mod:`optimizer.report`.
"""
