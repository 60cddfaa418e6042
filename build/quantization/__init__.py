"""Shared by build/quantize.py and build/evaluate.py: text windows, running a decoder, methods, measures."""
