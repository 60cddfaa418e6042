"""What build/quantize.py and build/evaluate.py share: text in windows, a decoder over them, methods, measures."""
