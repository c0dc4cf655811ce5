"""Stands in for torchvision, whose wheel is made for CUDA; SGLang serves no images here."""

__version__ = "0.28.0"
