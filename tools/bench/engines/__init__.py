"""Engines to compare with: each is set up below target/peers, given the same checkpoint, and measured.

An engine has a `name`, says what its `precision` really is on this machine, prepares a checkpoint, and measures one
round: `{(kind, concurrency): tokens a second}`, where kind is `prompt` or `generation`. What it cannot do it says
with `Unavailable`.
"""
