"""Language: the next token of a text, or masked ones."""
