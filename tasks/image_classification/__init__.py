"""Image classification: what an image shows, by any network of torchvision or timm.

For what compiling gains on convolutions and on vision transformers.
"""
