"""The verbs of the `slipstream` command, a module each: docstring (the verb's help), add_arguments(parser), run()."""
