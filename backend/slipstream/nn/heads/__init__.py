"""Small modules beside a decoder that guess its next tokens: Medusa heads, MTP modules, EAGLE heads."""
