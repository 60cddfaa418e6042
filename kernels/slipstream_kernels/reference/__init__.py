"""The operations in plain torch: the oracle of the tests, and the engine's CPU path (so:
written to be fast there too).
"""
