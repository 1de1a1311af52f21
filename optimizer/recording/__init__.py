"""Recording: texts are decoded once and stored, with what each draft proposes at every position.

In: a workload, and a pair that is loaded or an engine that runs. Out: a recording in the database,
its panoramas, and of an engine what its steps cost. A recording continues where it was interrupted.
"""
