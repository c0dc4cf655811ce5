from torchvision._names import InterpolationMode, anything

__all__ = ["InterpolationMode"]

__getattr__ = anything(__name__)
