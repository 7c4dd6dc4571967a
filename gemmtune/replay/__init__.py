"""Replay: the default and a tuned table in alternating blocks of steps inside the running job."""
