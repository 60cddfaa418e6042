"""Implementations that are calls of torch's own libraries, where those are at the peak of the machine."""
