"""`slipstream convert`: folders as people have them, written once as safetensors and tokenizer.json."""
