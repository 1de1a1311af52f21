"""The commands, by what they are about: each opens, calls one function, and prints a table, or with
--json one object on stdout.

Only :mod:`cli` imports them, and importing them imports no torch: a command imports what it needs
when it runs.
"""
