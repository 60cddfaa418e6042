"""GGUF files: read by the package `gguf`, written once as a Hugging Face checkpoint folder."""
