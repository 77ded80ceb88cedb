"""Engines to compare with: each is set up below target/peers, given the same checkpoint, and measured.

An engine has a `name`, says what its `precision` really is on this machine, prepares a checkpoint, and measures one
round: `{load: tokens a second}`. What it cannot do it says with `Unavailable`.
"""
