"""Draft heads of a decoder: Medusa heads, MTP modules, EAGLE heads."""
