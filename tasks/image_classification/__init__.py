"""Image classification: what an image shows, by any network of torchvision or timm."""
