"""Engines to compare with: each is installed below target/peers, gets the same checkpoint, and is measured.

An engine has a `name` and a `precision` (what it really uses on this machine), prepares a checkpoint, and measures one
round as `{load: tokens per second}`. It raises `Unavailable` for what it does not support.
"""
