"""Benchmarks of this machine: what is replayed, how it is timed, and what is reported. No command-line code here."""
