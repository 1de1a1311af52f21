"""Fitting to recordings what policies need: a file per paper; :mod:`optimizer.fit.shared` has what
every fit does."""
