"""What trees need that is fitted to recorded rounds: entropy bins, the node classifier, static shapes. Plain arrays in, plain
arrays out; no database, no models. :mod:`optimizer.fits.from_trace` takes the arrays from a trace, :mod:`optimizer.fit` stores what
came of them."""
