"""One tuning: what is proposed is raced, the winner confirmed on requests held out, and published.

In: a bench (the native decoder, an engine started here, a server that runs) over a recording, and
the place where the policy is put in force. Out: a :class:`optimizer.tuning.tuned.Tuned`.
"""
