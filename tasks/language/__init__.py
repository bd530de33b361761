"""Language: the next token of a text, or masked ones. For what compiling gains on text, dense, packed or ragged."""
