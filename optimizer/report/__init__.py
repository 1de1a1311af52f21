"""A tuning as a page of HTML, in sentences and in charts.

In: a :class:`optimizer.tuning.tuned.Tuned` and the policies that were tried. Out: one file that
loads nothing from outside.
"""
