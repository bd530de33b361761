"""Guards: what is checked before the first step and while training: does it compile, is it eager's, is it faster."""
