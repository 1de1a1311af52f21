"""Fits what policies need to a recording: a file per paper.

In: the part of a recording that is kept for fitting. Out: artifacts, stored under the hash of their
content. :mod:`optimizer.fit.shared` has what every fit does.
"""
